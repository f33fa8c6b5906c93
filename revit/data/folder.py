"""Anybody's own images: a folder for each class, or a CSV file that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revit.data.file_images import FileImages, KeptImages
from revit.data.image_files import printable
from revit.data.listing import Listing, list_folder
from revit.data.manifest import read_manifest
from revit.data.registry import data_root, register_dataset
from revit.data.scan import Progress, Scan, reason, scan_images
from revit.data.spec import BadImage, DataError, DataOptions, Dataset, DataSpec, Images, stratified_split, too_many_bad

_WORDS = {"train": "training", "val": "validation", "test": "test"}


@register_dataset("folder")
def folder(options: DataOptions, progress: Progress | None = None) -> Dataset:
    """Your own image files: one folder for each class, or a CSV manifest.

    Parts that are not given are split off class by class: the test part first, then the validation part from what remains.
    All images are looked at before the first is used (see `scan`). Images of one size that is not changed are decoded once and
    kept if they fit into `memory_gb`; others are read when they are needed, so that crops come from the whole image.
    """
    root, listing, source = _listed(options)
    files = _split(listing, options)
    scan = scan_images(files.paths, files.parts == "train", str(root), options.size, progress)
    skipped, count = _bad_files(files, scan, options), len(files.paths)
    files = files.only(~np.isin(np.arange(len(files.paths)), [i for i, _ in scan.bad]))
    _check(files)
    keeps = scan.one_size and len(files.paths) * _bytes(scan) <= options.memory_gb * 2**30
    splits: list[Images] = []
    for part in _WORDS:
        chosen = files.only(files.parts == part)
        images = FileImages(chosen.paths, chosen.labels, scan.fit)
        splits.append(_keep(images, scan, options.on_bad, skipped) if keeps else images)
    if len(skipped) > options.max_bad * count:
        raise too_many_bad(len(skipped), count, options.max_bad, ": ".join(skipped[0]))
    spec = DataSpec(
        name="folder",
        channels=scan.channels,
        size=scan.size,
        classes=tuple(printable(name) for name in files.classes),
        mean=scan.mean,
        std=scan.std,
        source="; ".join([source, *files.notes, *([f"{len(skipped)} bad files left out"] if skipped else [])]),
    )
    return Dataset(spec, *splits, skipped=tuple(skipped))


@dataclass(frozen=True)
class _Files:
    """Files with their labels [N] and parts [N], and what is to be said about the parts."""

    paths: list[str]
    labels: NDArray[np.int64]
    parts: NDArray[np.str_]
    classes: list[str]
    notes: tuple[str, ...]

    def only(self, chosen: NDArray[np.bool_]) -> _Files:
        paths = [self.paths[i] for i in np.flatnonzero(chosen)]
        return _Files(paths, self.labels[chosen], self.parts[chosen], self.classes, self.notes)


def _listed(options: DataOptions) -> tuple[Path, Listing, str]:
    """The root, its images, and where they come from in words."""
    if options.file is None:
        root = data_root(options)
        return root, list_folder(root), f"folder {printable(root.resolve().name)}"
    file = Path(options.file).expanduser()
    root = file.parent if options.root is None and file.is_absolute() else data_root(options)
    return root, read_manifest(root / file, root), f"manifest {printable(file.name)}"


def _split(listing: Listing, options: DataOptions) -> _Files:
    number = {name: i for i, name in enumerate(listing.classes)}
    labels = np.array([number[label] for label in listing.labels], dtype=np.int64)
    parts = np.array(listing.parts, dtype="<U5")
    notes = []
    given = set(listing.parts)
    parts[parts == ""] = "train"
    for part, fraction in (("test", options.test_fraction), ("val", options.val_fraction)):
        if part in given:
            continue
        pool = np.flatnonzero(parts == "train")
        held = stratified_split(labels[pool], fraction, options.split_seed)[1]
        if not len(held):
            raise DataError(f"no class has the two images that it takes to split off a {_WORDS[part]} part; add images")
        parts[pool[held]] = part
        whole = "all images" if given == {""} and part == "test" else "the training images"
        notes.append(f"{_WORDS[part]}: {fraction:g} of {whole}, class by class, seed {options.split_seed}")
    return _Files(listing.paths, labels, parts, listing.classes, tuple(notes))


def _bad_files(files: _Files, scan: Scan, options: DataOptions) -> list[tuple[str, str]]:
    """Names and reasons of the files to leave out, or the error that they are."""
    bad = [(printable(files.paths[i]), text) for i, text in scan.bad]
    share = f"{len(bad)} of {len(files.paths)} images cannot be read"
    if bad and options.on_bad == "stop":
        raise BadImage(f"{bad[0][0]}: {bad[0][1]} ({share}; --on-bad skip goes on without them)")
    if len(bad) > options.max_bad * len(files.paths):
        raise too_many_bad(len(bad), len(files.paths), options.max_bad, f"{bad[0][0]}: {bad[0][1]}")
    return bad


def _check(files: _Files) -> None:
    """After bad files have gone, each part must still have images, and training some of each class."""
    for part, word in _WORDS.items():
        if not (files.parts == part).any():
            raise DataError(f"no {word} image is left without the bad files; replace them")
    trained = np.unique(files.labels[files.parts == "train"])
    for label, name in enumerate(files.classes):
        if label not in trained:
            raise DataError(f"class {printable(name)} has no training image left without the bad files; replace them")


def _bytes(scan: Scan) -> int:
    """Memory of one image."""
    return scan.channels * scan.size[0] * scan.size[1] * (4 if scan.floating else 1)


def _keep(images: FileImages, scan: Scan, on_bad: str, skipped: list[tuple[str, str]]) -> KeptImages:
    """Decodes a split. The scan has seen a sample of very large folders only, so bad files may turn up here too."""
    pixels = np.empty((len(images), scan.channels, *scan.size), dtype=np.float32 if scan.floating else np.uint8)
    good: list[int] = []
    for i, path in enumerate(images.paths):
        try:
            pixels[len(good)] = images.read(i)
        except BadImage as error:
            if on_bad == "stop":
                raise
            skipped.append((printable(path), reason(error, path)))
        else:
            good.append(i)
    return KeptImages([images.paths[i] for i in good], images.labels[good], pixels[: len(good)])
