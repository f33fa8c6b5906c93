"""ImageNet-1K as its archives unpack: more than a million files, which are listed and not looked at before use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from revit.data.file_images import FileImages, Fit
from revit.data.image_files import is_image_name, printable
from revit.data.registry import data_root, register_dataset
from revit.data.spec import DataError, DataOptions, Dataset, DataSpec, stratified_split

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
CENTRE = 224 / 256
"""Evaluation looks at the centre: shorter side 256, of which 224 are cut out; other sizes in the same ratio."""

VAL_FRACTION, VAL_IMAGES = 0.01, 50_000
"""Share of train, and number of images, that model selection gets at most."""

_SORTING = (
    "the official archive holds all validation images in one folder: sort them into val/<wnid>/ by the list"
    " ILSVRC2012_validation_ground_truth.txt of the development kit, as the script valprep.sh does"
)


@register_dataset("imagenet")
def imagenet(options: DataOptions) -> Dataset:
    """ImageNet-1K in the folders train/<wnid> and val/<wnid>, which you download yourself.

    The official validation images are the test part, so model selection cannot use them: it has images that are held out of
    train instead.
    """
    root = _root(data_root(options))
    classes = _class_folders(root / "train")
    if len(classes) < 2:
        raise DataError(f"{printable(root / 'train')}: {len(classes)} class folders, at least 2 are needed; unpack train here")
    tested = _class_folders(root / "val")
    if not tested:
        raise DataError(f"{printable(root / 'val')}: no class folders; {_SORTING}")
    if tested != classes:
        odd = sorted(set(classes) ^ set(tested))
        raise DataError(
            f"{printable(root)}: {len(odd)} classes are in train or val alone, such as {printable(odd[0])}; unpack both whole"
        )
    train, labels = _list_images(root / "train", classes)
    test, test_labels = _list_images(root / "val", classes)
    fraction = min(options.val_fraction, VAL_FRACTION, VAL_IMAGES / len(train))
    kept, held = stratified_split(labels, fraction, options.split_seed)
    if not len(held):
        raise DataError(f"{printable(root / 'train')}: no class has two images, so none can be held out for validation")
    side = SIZE if options.size is None else options.size
    spec = DataSpec(
        name="imagenet",
        channels=3,
        size=(side, side),
        classes=tuple(printable(name) for name in classes),
        mean=MEAN,
        std=STD,
        source=(
            f"{len(classes):,} class folders; test: the official validation images ({len(test):,});"
            f" validation: {len(held):,} of the training images, class by class, seed {options.split_seed}"
        ),
        centre=CENTRE,
    )
    fit = Fit(3, spec.size, centre=spec.centre)
    return Dataset(
        spec,
        FileImages(train.take(kept), labels[kept], fit),
        FileImages(train.take(held), labels[held], fit),
        FileImages(test, test_labels, fit),
    )


class PathTable(Sequence[str]):
    """Very many paths in little memory, some 30 bytes each: folders once, names one after another, and where each ends.

    Bytes and arrays also stay shared with worker processes, whereas looking at a list of strings copies its memory.
    """

    def __init__(
        self, folders: list[str], folder_of: NDArray[np.int32], names: bytes, ends: NDArray[np.int64], chosen: NDArray[np.int64]
    ) -> None:
        self.folders, self.folder_of, self.names, self.ends, self.chosen = folders, folder_of, names, ends, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> PathTable: ...
    def __getitem__(self, index: int | slice) -> str | PathTable:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        i = self.chosen[index]
        name = self.names[self.ends[i - 1] if i else 0 : self.ends[i]]
        return os.path.join(self.folders[self.folder_of[i]], os.fsdecode(name))

    def take(self, indices: NDArray[np.int64]) -> PathTable:
        return PathTable(self.folders, self.folder_of, self.names, self.ends, self.chosen[indices])


def _root(root: Path) -> Path:
    for folder in (root, root / "imagenet"):
        if (folder / "train").is_dir():
            if not (folder / "val").is_dir():
                raise DataError(f"{printable(folder)}: has train but no val; {_SORTING}")
            return folder
    raise DataError(
        f"{printable(root)}: no folder train in it or in imagenet below it; name the folder with train/<wnid>/*.JPEG"
    )


def _class_folders(folder: Path) -> list[str]:
    return sorted(name for name, is_folder in _scan(folder) if is_folder)


def _list_images(folder: Path, classes: list[str]) -> tuple[PathTable, NDArray[np.int64]]:
    """The images of all classes, in the order of their names, and their labels."""
    names, lengths, counts = bytearray(), list[NDArray[np.int64]](), []
    for label in classes:
        found = sorted(os.fsencode(name) for name, is_folder in _scan(folder / label) if not is_folder and is_image_name(name))
        if not found:
            raise DataError(f"{printable(folder / label)}: a class without images; unpack its archive here")
        names += b"".join(found)
        lengths.append(np.fromiter(map(len, found), dtype=np.int64, count=len(found)))
        counts.append(len(found))
    labels = np.repeat(np.arange(len(classes)), counts)
    ends = np.cumsum(np.concatenate(lengths))
    folders = [os.path.join(folder, label) for label in classes]
    return PathTable(folders, labels.astype(np.int32), bytes(names), ends, np.arange(len(labels))), labels


def _scan(folder: Path) -> list[tuple[str, bool]]:
    """Names in a folder that are not hidden, and whether they are folders. No file is opened or asked for more."""
    try:
        with os.scandir(folder) as found:
            return [(entry.name, entry.is_dir()) for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror}); try chmod u+rx on it") from error
