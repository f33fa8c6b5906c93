"""A look at all images of a folder before they are used: sizes, channels, bad files, and mean and deviation for training.

Decoding everything takes time, so the result is kept in the cache until a file changes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.cache import fingerprint, keep_cached, load_cached
from revit.data.file_images import Fit
from revit.data.image_files import ImageHeader, image_header, printable
from revit.data.spec import BadImage, DataError, Pixels
from revit.data.statistics import channel_statistics

MAX_DECODED = 50_000
"""Images that are decoded. Of larger sets a sample: means do not get better, and the loader finds bad files too."""

MAX_SIDE = 224
"""Default size of larger images, that of the models of the paper."""

Progress = Callable[[int, int], None]
_VERSION = 1  # of what is kept; a change of the rules below raises it


@dataclass(frozen=True)
class Scan:
    """What was found. `bad` holds the numbers of files that cannot be used, with the reasons."""

    channels: int
    size: tuple[int, int]
    floating: bool  # some image has more than 8 bits
    one_size: bool  # every image has the size above already
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bad: tuple[tuple[int, str], ...]

    @property
    def fit(self) -> Fit:
        return Fit(self.channels, self.size, self.floating)


def scan_images(
    paths: Sequence[str], is_train: NDArray[np.bool_], root: str, size: int | None = None, progress: Progress | None = None
) -> Scan:
    """Looks at all images; mean and deviation are those of the training images, resized as a model sees them.

    `progress(done, total)` is called after each step, where a step is the header of a file or a decoded image.
    """
    key = f"scans/{fingerprint(_VERSION, size, MAX_DECODED, [_identity(path, root) for path in paths], _packed(is_train))}.json"
    kept = _kept(load_cached(key), paths)
    if kept is not None:
        return kept
    found = _scan(paths, is_train, size, progress or (lambda done, total: None))
    keep_cached(key, asdict(found))
    return found


def _scan(paths: Sequence[str], is_train: NDArray[np.bool_], size: int | None, progress: Progress) -> Scan:
    sample = _sample(len(paths))
    total = len(paths) + len(sample)
    bad: dict[int, str] = {}
    headers: dict[int, ImageHeader] = {}
    for i, path in enumerate(paths):
        try:
            headers[i] = image_header(path)
        except BadImage as error:
            bad[i] = reason(error, path)
        progress(i + 1, total)
    if not headers:
        raise DataError(f"none of the {len(paths)} images can be read; the first: {printable(paths[0])}: {bad[0]}")
    fit = common_fit(list(headers.values()), size)

    def training_images() -> Iterator[Pixels]:
        for done, i in enumerate(sample.tolist()):
            if i in headers:
                try:
                    image = fit.read(paths[i])
                    if is_train[i]:
                        yield image
                except BadImage as error:
                    bad[i] = reason(error, paths[i])
            progress(len(paths) + done + 1, total)

    images = training_images()
    first = next(images, None)
    if first is None:
        i = min(i for i in bad if is_train[i])
        raise DataError(f"none of the training images can be read; the first: {printable(paths[i])}: {bad[i]}")
    mean, std = channel_statistics(chain([first], images))
    one_size = all((header.height, header.width) == fit.size for i, header in headers.items() if i not in bad)
    return Scan(fit.channels, fit.size, fit.floating, one_size, mean, std, tuple(sorted(bad.items())))


def common_fit(headers: list[ImageHeader], size: int | None) -> Fit:
    """What all images are brought to. Those with too few or too many channels have no say."""
    channels = _channels(Counter(header.channels for header in headers))
    usable = [header for header in headers if Fit(channels, (1, 1)).takes(header.channels)]
    chosen = (size, size) if size is not None else _size([(header.height, header.width) for header in usable])
    return Fit(channels, chosen, floating=any(header.floating for header in usable))


def reason(error: BadImage, path: str) -> str:
    """What is wrong with a file, without its name."""
    return str(error).removeprefix(f"{printable(path)}: ")


def _sample(count: int) -> NDArray[np.int64]:
    """The images that are decoded, in order: all, or many at random."""
    if count <= MAX_DECODED:
        return np.arange(count)
    return np.sort(np.random.Generator(np.random.PCG64(0)).permutation(count)[:MAX_DECODED])


def _channels(counts: Counter[int]) -> int:
    """The usual number of channels; 3 if there are grey and colour images, since grey can become colour."""
    usual = max(counts, key=lambda channels: (counts[channels], channels))
    return 3 if usual == 1 and 3 in counts else usual


def _size(sides: list[tuple[int, int]]) -> tuple[int, int]:
    """The size of the images if it is one and not too large; or else a square that enlarges at most half of them."""
    if len(set(sides)) == 1 and max(sides[0]) <= MAX_SIDE:
        return sides[0]
    side = min(MAX_SIDE, int(np.median([min(height, width) for height, width in sides])))
    return side, side


def _identity(path: str, root: str) -> tuple[str, int, int]:
    """What changes when a file does: its name below the root, bytes and time."""
    name = os.path.relpath(path, root)
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a name with a zero byte is a ValueError
        return name, -1, 0
    return name, found.st_size, found.st_mtime_ns


def _packed(is_train: NDArray[np.bool_]) -> str:
    return np.packbits(is_train).tobytes().hex()


def _kept(values: Any, paths: Sequence[str]) -> Scan | None:
    """An earlier result, unless a file that was bad can be read now: new permissions leave no trace in bytes and time."""
    try:
        scan = Scan(
            channels=int(values["channels"]),
            size=(int(values["size"][0]), int(values["size"][1])),
            floating=bool(values["floating"]),
            one_size=bool(values["one_size"]),
            mean=tuple(float(m) for m in values["mean"]),
            std=tuple(float(s) for s in values["std"]),
            bad=tuple((int(i), str(text)) for i, text in values["bad"]),
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    for i, _ in scan.bad:
        try:
            scan.fit.read(paths[i])
        except BadImage:
            continue
        return None
    return scan
