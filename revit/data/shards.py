"""Sharded archives: training sets of any size as a few tar files, read in place and nearly in sequence.

Samples are numbered archive by archive, and `ShardImages.blocks` says where each begins. The training order (see
`revit.data.randomness.block_permutation`) stays within a few archives at a time, so that a set larger than the memory for disk
pages is read like a stream, whereas every choice stays a function of (seed, epoch, sample).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.file_images import Fit
from revit.data.image_files import MAX_BYTES, ImageBytes, image_header, printable
from revit.data.listing import PARTS, natural
from revit.data.randomness import WINDOW
from revit.data.registry import Progress, data_root, register_dataset
from revit.data.scan import common_fit
from revit.data.spec import BadImage, Crop, DataError, DataOptions, Dataset, DataSpec, Pixels, stratified_split
from revit.data.statistics import channel_statistics
from revit.data.tar_index import BLOCK, TarIndex, holds_member, tar_index

ABOUT, FORMAT, MAX_ABOUT = "dataset.json", 1, 1 << 24
SAMPLE = 2000
"""Training images that are looked at where nothing tells size, mean and deviation."""

_LAYOUT = "name archives ROOT/train-000000.tar, ROOT/val-000000.tar, ROOT/test-000000.tar; `revit data pack` makes them"
_WORDS = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class Sources:
    """Where images lie: archives, first byte and length [N] of each, and their names one after another."""

    paths: tuple[str, ...]
    archive: NDArray[np.int32]  # [N], which of the paths, ascending
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: bytes
    ends: NDArray[np.int64]  # [N], of the names

    def name(self, index: int) -> str:
        member = os.fsdecode(self.names[self.ends[index - 1] if index else 0 : self.ends[index]])
        return printable(os.path.join(self.paths[self.archive[index]], member))


class OpenFiles:
    """Files that were read from of late, still open; a copy in another process opens its own."""

    def __init__(self, limit: int) -> None:
        self.limit, self.handles = limit, dict[str, int]()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "handles": {}}

    def __del__(self) -> None:
        self.close(0)

    def read(self, path: str, start: int, count: int) -> bytes:
        """Bytes of a file, fewer where it ends."""
        handle = self.handles.pop(path, None)
        self.handles[path] = os.open(path, os.O_RDONLY) if handle is None else handle  # the latest is the last
        self.close(self.limit)
        return os.pread(self.handles[path], count, start)

    def close(self, kept: int) -> None:
        """Closes all but the latest few."""
        while len(self.handles) > kept:
            os.close(self.handles.pop(next(iter(self.handles))))


class ShardImages:
    """Some of the images of archives, in the order of the archives. At most `2 * WINDOW` archives are open at a time."""

    def __init__(self, sources: Sources, numbers: NDArray[np.int64], labels: NDArray[np.int64], fit: Fit) -> None:
        self.sources, self.numbers, self.labels, self.fit = sources, numbers, labels, fit
        changes = np.flatnonzero(np.diff(sources.archive[numbers], prepend=-1))
        self.blocks = np.append(changes, len(numbers))  # samples of archive k: blocks[k] ... blocks[k + 1] - 1
        self.files = OpenFiles(2 * WINDOW)

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.sources.name(int(self.numbers[index]))

    def source(self, index: int) -> ImageBytes:
        """The bytes of an image file. That the archive still has it there is seen from the header in front of it."""
        i = int(self.numbers[index])
        start, size, path = int(self.sources.starts[i]), int(self.sources.sizes[i]), self.sources.paths[self.sources.archive[i]]
        name = self.name(index)
        if size > MAX_BYTES:
            raise BadImage(f"{name}: {size} bytes, more than the {MAX_BYTES} that are read; store it smaller")
        try:
            data = self.files.read(path, start - BLOCK, BLOCK + size)
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); check the disk and try again") from error
        if len(data) != BLOCK + size or not holds_member(data[:BLOCK], size):
            raise DataError(f"{printable(path)}: changed since it was opened; start again, and leave it alone meanwhile")
        return ImageBytes(data[BLOCK:], name)

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        return self.fit.read(self.source(index), crop)


@register_dataset("shards")
def shards(options: DataOptions, progress: Progress | None = None) -> Dataset:
    """Tar archives of images and labels (webdataset), for training sets of any size.

    Names say the part: train-000000.tar, val-..., test-.... Parts that are not there are split off the training images, class
    by class: the test part first, then the validation part from what remains. `dataset.json`, which `revit data pack` writes,
    has the description of the images; without it the labels are the names of the classes, and some images are looked at.
    """
    root = data_root(options)
    paths = _archives(root)
    indexes: dict[str, list[TarIndex]] = {part: [] for part in ("train", "val", "test")}
    for done, (path, part) in enumerate(paths):
        indexes[part].append(tar_index(path))
        if progress is not None:
            progress(done + 1, len(paths))
    about = _about(root, {part: sum(len(index.names) for index in found) for part, found in indexes.items()})
    classes = about[0].classes if about else _classes(indexes["train"])
    tables = {part: (_sources(found), _labels(found, classes, described=about is not None)) for part, found in indexes.items()}
    parts, notes = _split(tables, options)
    fit = Fit(3, (1, 1))
    images = [ShardImages(tables[table][0], numbers, tables[table][1][numbers], fit) for table, numbers in parts]
    if about:
        spec, floating = about
        fit = Fit(spec.channels, spec.size, floating, spec.centre)
    else:
        fit, mean, std = _look(images[0], options)
        spec = DataSpec(
            name="shards", channels=fit.channels, size=fit.size, classes=tuple(printable(name) for name in classes),
            mean=mean, std=std, source="; ".join([f"{len(paths)} archives of {printable(root.resolve().name)}", *notes]),
        )  # fmt: skip
    if options.size is not None:
        spec, fit = replace(spec, size=(options.size, options.size)), replace(fit, size=(options.size, options.size))
    for split in images:
        split.fit = fit
    return Dataset(spec, *images)


def _archives(root: Path) -> list[tuple[Path, str]]:
    """The archives of the root and of the folders in it, by name, with the part of each."""
    found = sorted((*root.glob("*.tar"), *root.glob("*/*.tar")), key=lambda path: natural(str(path.relative_to(root))))
    found = [path for path in found if not path.name.startswith(".")]
    if not found:
        packed = [path for kind in ("gz", "bz2", "xz", "zst") for path in root.glob(f"*.tar.{kind}")] + [*root.glob("*.tgz")]
        if packed:
            raise DataError(f"{printable(packed[0])}: packed, so single images cannot be reached; unpack it to a plain .tar")
        raise DataError(f"{printable(root)}: no .tar archives; {_LAYOUT}")
    parts = [_part(path.relative_to(root)) for path in found]
    if not any(parts):
        return [(path, "train") for path in found]
    if not all(parts):
        odd = found[parts.index("")]
        raise DataError(f"{printable(odd)}: its name has none of the words train, val and test, as others have; {_LAYOUT}")
    if "train" not in parts:
        raise DataError(f"{printable(root)}: no archive for training; {_LAYOUT}")
    return list(zip(found, parts, strict=True))


def _part(path: Path) -> str:
    """The part that the words of a name say, or "" if they say none."""
    parts = {PARTS[word] for word in re.split(r"[^a-z]+", str(path.with_suffix("")).lower()) if word in PARTS}
    if len(parts) > 1:
        raise DataError(f"{printable(path)}: its name has the words {' and '.join(sorted(parts))}; keep one of them")
    return parts.pop() if parts else ""


def _about(root: Path, counts: dict[str, int]) -> tuple[DataSpec, bool] | None:
    """The description that lies beside the archives, and whether images have more than 8 bits."""
    path = root / ABOUT
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_ABOUT:
            raise ValueError("larger than any description")
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise ValueError("of another format")
        spec, floating = DataSpec.from_dict(values["spec"]), bool(values["floating"])
        expected = {part: int(values["images"][part]) for part in counts}
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); try chmod +r") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{printable(path)}: no description of archives; remove it, or pack the images again") from error
    for part, count in counts.items():
        if count != expected[part]:
            raise DataError(
                f"{printable(root)}: {count:,} {_WORDS[part]} images in its archives, {expected[part]:,} in {ABOUT};"
                " copy the archives again, or remove that file if you have changed them"
            )
    return spec, floating


def _classes(train: list[TarIndex]) -> tuple[str, ...]:
    """The labels that occur in training, numbers in their order."""
    return tuple(sorted({label for index in train for label in index.labels}, key=natural))


def _labels(indexes: list[TarIndex], classes: tuple[str, ...], *, described: bool) -> NDArray[np.int64]:
    """Numbers of classes [N]. Where the classes are described, a label that is a number means the class of that number."""
    numbers = {name: i for i, name in enumerate(classes)}
    if described:
        numbers |= {str(i): i for i in range(len(classes))}
    labels: list[int] = []
    for index in indexes:
        try:
            labels += [numbers[label] for label in index.labels]
        except KeyError as error:
            known = f"{ABOUT} has {len(classes)} classes" if described else "no training image has it"
            raise DataError(
                f"{printable(index.path)}: an image has the label {printable(error.args[0])}, but {known}"
            ) from error
    return np.array(labels, dtype=np.int64)


def _sources(indexes: list[TarIndex]) -> Sources:
    names = [os.fsencode(name) for index in indexes for name in index.names]
    return Sources(
        paths=tuple(index.path for index in indexes),
        archive=np.repeat(np.arange(len(indexes), dtype=np.int32), [len(index.names) for index in indexes]),
        starts=np.array([start for index in indexes for start in index.starts], dtype=np.int64),
        sizes=np.array([size for index in indexes for size in index.sizes], dtype=np.int64),
        names=b"".join(names),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
    )


def _split(
    tables: dict[str, tuple[Sources, NDArray[np.int64]]], options: DataOptions
) -> tuple[list[tuple[str, NDArray[np.int64]]], list[str]]:
    """For train, val and test: the table that holds the part and its rows; and what is to be said about it."""
    rest, chosen, notes = np.arange(len(tables["train"][1])), {}, []
    for part, fraction in (("test", options.test_fraction), ("val", options.val_fraction)):
        if len(tables[part][1]):
            chosen[part] = (part, np.arange(len(tables[part][1])))
            continue
        kept, held = stratified_split(tables["train"][1][rest], fraction, options.split_seed)
        if not len(held):
            raise DataError(f"no class has the two images that it takes to split off a {_WORDS[part]} part; add images")
        chosen[part], rest = ("train", rest[held]), rest[kept]
        notes.append(f"{_WORDS[part]}: {fraction:g} of the training images, class by class, seed {options.split_seed}")
    return [("train", rest), chosen["val"], chosen["test"]], notes


def _look(images: ShardImages, options: DataOptions) -> tuple[Fit, tuple[float, ...], tuple[float, ...]]:
    """What all images are brought to, and their mean and deviation, from a sample spread over the archives."""
    sample = np.unique(np.linspace(0, len(images) - 1, SAMPLE).astype(int)).tolist()
    headers, good, bad = [], [], list[BadImage]()
    for i in sample:
        try:
            headers.append(image_header(images.source(i)))
            good.append(i)
        except BadImage as error:
            bad.append(error)
            if options.on_bad == "stop":
                raise
    if not headers:
        raise DataError(f"none of {len(sample)} training images can be read; the first: {bad[0]}")
    images.fit = common_fit(headers, options.size)

    def readable() -> Iterator[Pixels]:
        for i in good:
            try:
                yield images.read(i)
            except BadImage:
                if options.on_bad == "stop":
                    raise

    pixels = readable()
    first = next(pixels, None)
    if first is None:
        raise DataError(f"none of {len(sample)} training images can be decoded; look at {images.name(good[0])}")
    return images.fit, *channel_statistics(chain([first], pixels))
