"""Images without labels: files, folders and patterns, or one .npz of encoded images or of arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.arrays import checked_images
from revit.data.file_images import FileImages, Fit
from revit.data.finding import find_images
from revit.data.image_files import ImageBytes, printable
from revit.data.npz import read_arrays
from revit.data.spec import Crop, DataError, Images, Pixels

MAX_IMAGES = 10_000_000
_ENCODED = ("jpeg", "offsets", "names")
_LAYOUTS = "store jpeg (uint8, all files one after another) with offsets (int64 [N + 1]), or test_images (uint8 [N, H, W, C])"
_LONGEST_NAME = 200


def open_images(patterns: Sequence[str], fit: Fit) -> Images:
    """Images for questions that need no labels: all labels are 0. Each image is brought to the channels and size of the fit.

    The patterns are those of `find_images`, or one .npz with `jpeg` (uint8, the bytes of all image files one after another, of
    any format that is read from files), `offsets` (whole numbers [N + 1]: image i is `jpeg[offsets[i]:offsets[i + 1]]`) and,
    if they have names, `names` [N]; or one with `test_images` (uint8 [N, H, W] or [N, H, W, C]).
    """
    if not patterns:
        raise DataError("no images are named; give image files, folders, patterns or one .npz")
    archives = [name for name in patterns if name.lower().endswith(".npz") and os.path.isfile(os.path.expanduser(name))]
    if archives and len(patterns) > 1:
        raise DataError(f"{printable(archives[0])}: one of {len(patterns)} names; an .npz is read alone, leave out the others")
    if archives:
        return _open_npz(Path(archives[0]).expanduser(), fit)
    paths = [os.fspath(path) for path in find_images(patterns)]
    return FileImages(paths, np.zeros(len(paths), dtype=np.int64), fit)


class EncodedImages:
    """Images whose files lie in one array [bytes]; image i begins at `offsets[i]` and ends at `offsets[i + 1]`."""

    def __init__(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64], names: Sequence[str] | None, prefix: str, fit: Fit
    ) -> None:
        self.data, self.offsets, self.names, self.prefix, self.fit = data, offsets, names, prefix, fit
        self.labels = np.zeros(len(offsets) - 1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.prefix}, image {index}" + (f" ({self.names[index]})" if self.names is not None else "")

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        data = self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return self.fit.read(ImageBytes(data, self.name(index)), crop)


class FittedArrays:
    """Images that lie in memory, [N, C, H, W], in channels and a size of their own."""

    def __init__(self, images: NDArray[np.uint8], prefix: str, fit: Fit) -> None:
        self.images, self.prefix, self.fit = images, prefix, fit
        self.labels = np.zeros(len(images), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.prefix}, image {index}"

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        return np.array(self.fit.apply(self.images[index], self.name(index), crop))  # a copy: the caller may change it


def _open_npz(path: Path, fit: Fit) -> Images:
    shown = printable(path)
    arrays = read_arrays(path, _ENCODED)
    if "jpeg" in arrays and "offsets" in arrays:
        data, offsets = arrays["jpeg"], arrays["offsets"]
        if data.ndim != 1 or data.dtype != np.uint8:
            raise DataError(f"{shown}: jpeg must be uint8 [bytes], got {list(data.shape)} of {data.dtype}; {_LAYOUTS}")
        offsets = _checked_offsets(shown, offsets, len(data))
        return EncodedImages(data, offsets, _checked_names(shown, arrays.get("names"), len(offsets) - 1), shown, fit)
    for key, other in (("jpeg", "offsets"), ("offsets", "jpeg")):
        if key in arrays:
            raise DataError(f"{shown}: has {key} but no {other}; {_LAYOUTS}")
    arrays = read_arrays(path, ("test_images",))
    if "test_images" not in arrays:
        raise DataError(f"{shown}: holds neither jpeg nor test_images; {_LAYOUTS}")
    images = checked_images(path, "test", arrays["test_images"])
    if not fit.takes(images.shape[1]):
        raise DataError(f"{shown}: test_images have {images.shape[1]} channels, the model takes {fit.channels}; store as many")
    return FittedArrays(images, shown, fit)


def _checked_offsets(shown: str, offsets: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Offsets that never decrease and stay within the array, so that each image is what its place says."""
    where = f"{shown}: offsets"
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise DataError(f"{where} must be at least two whole numbers [N + 1], got {list(offsets.shape)} of {offsets.dtype}")
    if len(offsets) - 1 > MAX_IMAGES:
        raise DataError(f"{where} stand for {len(offsets) - 1:,} images, at most {MAX_IMAGES:,} are read; make several files")
    # Compared, not subtracted: differences of unsigned numbers are never below 0.
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        i = int(falls[0])
        raise DataError(f"{where} go back from {offsets[i]} to {offsets[i + 1]} at image {i}; store np.cumsum of the lengths")
    if offsets[0] < 0 or offsets[-1] > size:
        raise DataError(
            f"{where} go from {offsets[0]} to {offsets[-1]}, but jpeg has {size} bytes; store both from the same files"
        )
    return offsets.astype(np.int64)


def _checked_names(shown: str, names: NDArray[Any] | None, count: int) -> list[str] | None:
    """Names as one printable line each: whoever made the file may have written anything."""
    if names is None:
        return None
    if names.shape != (count,) or names.dtype.kind != "U":
        raise DataError(
            f"{shown}: names must be {count} texts, got {list(names.shape)} of {names.dtype}; store np.array(names) or none"
        )
    try:
        texts = [str(name)[:_LONGEST_NAME] for name in names]
    except (ValueError, SystemError) as error:  # what Python raises for numbers that are no characters
        raise DataError(f"{shown}: names are damaged ({error}); store them again or leave them out") from error
    return ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) for text in texts]
