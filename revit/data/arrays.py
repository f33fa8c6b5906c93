"""Images that lie in memory as arrays, and the dataset of anybody's .npz file."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.cache import fingerprint, keep_cached, load_cached
from revit.data.npz import file_identity, read_arrays
from revit.data.registry import data_root, register_dataset
from revit.data.resize import crop_and_resize
from revit.data.spec import MAX_PIXELS, Crop, DataError, DataOptions, Dataset, DataSpec, Pixels, stratified_split
from revit.data.statistics import channel_statistics

PARTS = ("train", "val", "test")
_KEYS = (*(f"{part}_{kind}" for part in PARTS for kind in ("images", "labels")), "classes")


class ArrayImages:
    """A split in memory: images [N, C, H, W], uint8 or float32, and labels [N].

    `prefix` and a number name an image: "rotmnist/train/17". A part that was split off keeps the numbers of the whole.
    """

    def __init__(self, images: Pixels, labels: NDArray[Any], prefix: str, numbers: NDArray[np.int64] | None = None) -> None:
        if images.ndim != 4 or images.dtype not in (np.uint8, np.float32):
            raise DataError(
                f"{prefix}: images are [N, C, H, W] of uint8 or float32, got {list(images.shape)} of {images.dtype}"
            )
        if labels.shape != (len(images),):
            raise DataError(f"{prefix}: {len(images)} images need as many labels, got shape {list(labels.shape)}")
        # torch warns of memory that it must not write to, such as that of a file's bytes.
        self.images = images if images.flags.writeable else images.copy()
        self.labels, self.prefix = labels.astype(np.int64), prefix
        self.numbers = np.arange(len(images)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.prefix}/{self.numbers[index]}"

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        height, width = self.images.shape[2:]
        return np.array(crop_and_resize(self.images[index], (height, width), crop))  # a copy: the caller may change it

    def read_many(self, indices: NDArray[np.int64]) -> Pixels:
        """Several whole images at once, [B, C, H, W]: what a loader does fastest."""
        return self.images[indices]

    def subset(self, indices: NDArray[np.int64]) -> ArrayImages:
        return ArrayImages(self.images[indices], self.labels[indices], self.prefix, self.numbers[indices])


@dataclass(frozen=True)
class ArrayFile:
    """What an .npz holds, checked: for each part its images [N, C, H, W] and labels [N], and the class names if given."""

    path: Path
    parts: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
    classes: tuple[str, ...] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.parts["train"][0].shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """As many as there are names, or else labels."""
        return len(self.classes) if self.classes else 1 + max(int(labels.max()) for _, labels in self.parts.values())

    def splits(self, prefix: str, options: DataOptions) -> tuple[ArrayImages, ArrayImages, ArrayImages]:
        """Train, validation (held out of train if the file has none) and test."""
        train, test = (ArrayImages(*self.parts[part], f"{prefix}/{part}") for part in ("train", "test"))
        if "val" in self.parts:
            return train, ArrayImages(*self.parts["val"], f"{prefix}/val"), test
        return *hold_out(train, options), test


def hold_out(train: ArrayImages, options: DataOptions) -> tuple[ArrayImages, ArrayImages]:
    """Train and validation, class by class."""
    kept, held = stratified_split(train.labels, options.val_fraction, options.split_seed)
    if not len(held):
        raise DataError(f"{train.prefix}: no class has two images, so none can be held out for validation; add val_images")
    return train.subset(kept), train.subset(held)


def counts(train: Sized, val: Sized, test: Sized) -> str:
    return f"{len(train):,} train, {len(val):,} validation and {len(test):,} test images"


def read_npz(path: Path) -> ArrayFile:
    """Reads and checks an .npz of images.

    Keys: train_images, train_labels, test_images, test_labels, if there is a validation part val_images and val_labels, and if
    the classes have names, classes. Images are uint8, [N, H, W] or [N, H, W, C]; labels are whole numbers from 0.
    """
    arrays = read_arrays(path, _KEYS)
    parts = {}
    for part in PARTS:
        images, labels = arrays.pop(f"{part}_images", None), arrays.pop(f"{part}_labels", None)
        if part == "val" and images is None and labels is None:
            continue
        for kind, array in (("images", images), ("labels", labels)):
            if array is None:
                raise DataError(f"{path}: has no {part}_{kind}; name the arrays {', '.join(_KEYS[:2] + _KEYS[4:6])}")
        assert images is not None and labels is not None
        parts[part] = checked_images(path, part, images), _checked_labels(path, part, labels)
        if len(images) != len(labels):
            raise DataError(f"{path}: {part}_images has {len(images)} images but {part}_labels {len(labels)} labels")
        if parts[part][0].shape[1:] != parts["train"][0].shape[1:]:
            raise DataError(f"{path}: {part}_images are {_text(images)} but train_images are of another size; resize them")
    return ArrayFile(path, parts, _checked_classes(path, arrays.get("classes")))


def _text(array: NDArray[Any]) -> str:
    return f"{list(array.shape)} of {array.dtype}"


def checked_images(path: Path, part: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """The array `<part>_images` of a file, [N, H, W] or [N, H, W, C] -> [N, C, H, W]."""
    where = f"{path}: {part}_images"
    if images.ndim not in (3, 4) or images.dtype != np.uint8 or 0 in images.shape:
        raise DataError(f"{where} must be uint8 [N, H, W] or [N, H, W, C] with at least one image, got {_text(images)}")
    if images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.shape[1] < min(images.shape[2:]):
        raise DataError(f"{where} look channel-first, {_text(images)}; store images.transpose(0, 2, 3, 1)")
    if images.shape[1] * images.shape[2] > MAX_PIXELS:
        raise DataError(
            f"{where} have {images.shape[1]} x {images.shape[2]} pixels, at most {MAX_PIXELS:,} are read; resize them"
        )
    channels_last = images[..., None] if images.ndim == 3 else images
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))


def _checked_labels(path: Path, part: str, labels: NDArray[Any]) -> NDArray[np.int64]:
    where = f"{path}: {part}_labels"
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{where} must be whole numbers [N], got {_text(labels)}; store labels.ravel().astype('int64')")
    if len(labels) and not 0 <= labels.min() <= labels.max() < 2**31:
        raise DataError(f"{where} must count classes from 0, got {labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _checked_classes(path: Path, classes: NDArray[Any] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise DataError(f"{path}: classes must be a list of names, got {_text(classes)}; store np.array(['cat', 'dog'])")
    return tuple(str(name) for name in classes)


def check_classes(file: ArrayFile, num_classes: int) -> None:
    """Labels are 0 to K - 1, and each of them is there to learn from."""
    for part, (_, labels) in file.parts.items():
        if labels.max() >= num_classes:
            raise DataError(
                f"{file.path}: {part}_labels has label {labels.max()}, but the {num_classes} classes end at {num_classes - 1}"
            )
    present = np.unique(file.parts["train"][1])
    if len(present) < num_classes:
        first = next((i for i, label in enumerate(present) if i != label), len(present))
        raise DataError(f"{file.path}: train_labels has no image of class {first}; number the classes 0 to K - 1 without gaps")


def named_file(options: DataOptions, folder: Path | None = None) -> Path | None:
    """The file that the user named, below the folder unless its path is absolute."""
    if options.file is None:
        return None
    path = Path(options.file).expanduser()
    path = path if path.is_absolute() else (folder or data_root(options)) / path
    if not path.is_file():
        raise DataError(
            f"{path}: {'not a file' if path.exists() else 'no such file'}; --data.file names a file below --data-root"
        )
    return path


def open_npz_as(path: Path, options: DataOptions, spec: DataSpec) -> Dataset:
    """An .npz in place of the official files of a known dataset: same image size and classes, any number of images."""
    file = read_npz(path)
    if file.shape != (spec.channels, *spec.size):
        got, wanted = " x ".join(map(str, file.shape)), " x ".join(map(str, (spec.channels, *spec.size)))
        raise DataError(f"{path}: images are {got} (C x H x W), {spec.name} has {wanted}; open it with --data.name arrays")
    if file.classes not in (None, spec.classes):
        raise DataError(
            f"{path}: classes are not those of {spec.name} ({', '.join(spec.classes)}); open it with --data.name arrays"
        )
    check_classes(file, spec.num_classes)
    splits = file.splits(spec.name, options)
    source = f"{path.name}: {counts(*splits)}"
    return Dataset(replace(spec, source=source), *splits)


@register_dataset("arrays")
def open_arrays(options: DataOptions) -> Dataset:
    """Any .npz file with train_images, train_labels, test_images and test_labels (uint8, channels last)."""
    path = named_file(options) or _only_npz(data_root(options))
    file = read_npz(path)
    check_classes(file, file.num_classes)
    train, val, test = file.splits(path.stem, options)
    mean, std = _statistics(path, train, options)
    channels, height, width = file.shape
    classes = file.classes or tuple(map(str, range(file.num_classes)))
    source = f"{path.name}: {counts(train, val, test)}"
    return Dataset(DataSpec("arrays", channels, (height, width), classes, mean, std, source), train, val, test)


def _only_npz(root: Path) -> Path:
    found = sorted(root.glob("*.npz"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found[:10]) or "none"
    raise DataError(f"{root}: holds {len(found)} .npz files ({names}); say which one by --data.file NAME")


def _statistics(path: Path, train: ArrayImages, options: DataOptions) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations of the training images, kept until the file or the split changes."""
    key = f"statistics-{fingerprint(file_identity(path), options.val_fraction, options.split_seed)}.json"
    kept, channels = load_cached(key), train.images.shape[1]
    if isinstance(kept, list) and [len(row) for row in kept if isinstance(row, list)] == [channels, channels]:
        return tuple(map(float, kept[0])), tuple(map(float, kept[1]))
    blocks = (train.images[i : i + 256] for i in range(0, len(train), 256))
    # Pixels count alike wherever they are, so a block of images is one tall image.
    mean, std = channel_statistics(block.transpose(1, 0, 2, 3).reshape(channels, -1, block.shape[3]) for block in blocks)
    keep_cached(key, [mean, std])
    return mean, std
