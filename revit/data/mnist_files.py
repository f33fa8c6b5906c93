"""Plain MNIST as people have it: an .npz, or the four idx files of its authors, gzipped or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revit.data.archives import open_packed
from revit.data.npz import read_arrays
from revit.data.spec import DataError

FOLDERS = (".", "mnist", "MNIST", "MNIST/raw")  # the last is where torchvision puts it
IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MAX_BYTES = 256 * 2**20  # the largest of the files, train-images, has 47 million

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_KERAS_KEYS = ("x_train", "y_train", "x_test", "y_test")
_UINT8 = 8  # type code of the idx format


@dataclass(frozen=True)
class Mnist:
    """Digits as uint8 [N, 28, 28], their labels [N], and the name of the file they came from."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]
    source: str


def find_mnist(root: Path) -> Mnist | None:
    """MNIST below this folder, or nothing."""
    for folder in (root / name for name in FOLDERS):
        if (folder / "mnist.npz").is_file():
            return read_mnist_npz(folder / "mnist.npz")
        if _idx_file(folder, IDX_NAMES[0]) is not None:
            return read_mnist_idx(folder)
    return None


def read_mnist_npz(path: Path) -> Mnist:
    """MNIST from an .npz with train_images, train_labels, test_images, test_labels, or with Keras's names for them."""
    arrays = read_arrays(path, _KEYS + _KERAS_KEYS, fix="download mnist.npz again")
    for keys in (_KEYS, _KERAS_KEYS):
        if all(key in arrays for key in keys):
            return _checked(*(arrays[key] for key in keys), where=str(path), source=path.name)
    raise DataError(f"{path}: holds neither {', '.join(_KEYS)} nor {', '.join(_KERAS_KEYS)}; download mnist.npz again")


def read_mnist_idx(folder: Path) -> Mnist:
    """MNIST from its four idx files."""
    paths = [_idx_file(folder, name) for name in IDX_NAMES]
    missing = [name for name, path in zip(IDX_NAMES, paths, strict=True) if path is None]
    if missing:
        raise DataError(f"{folder}: MNIST lacks {', '.join(missing)} (or the same with .gz); all four files are needed")
    arrays = (read_idx(path, 3 if "idx3" in path.name else 1) for path in paths if path is not None)
    return _checked(*arrays, where=str(folder), source="MNIST's idx files")


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file: two zero bytes, the type, how many dimensions, their sizes, and exactly that many bytes."""
    with open_packed(path, MAX_BYTES) as stream:
        data = stream.read()
    magic, start = bytes((0, 0, _UINT8, dimensions)), 4 + 4 * dimensions
    if data[:4] != magic or len(data) < start:
        raise DataError(f"{path}: begins with {data[:4].hex() or 'nothing'} instead of {magic.hex()}: not this file of MNIST")
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist())
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{path}: says shape {list(shape)} but holds {len(data) - start:,} bytes instead of {math.prod(shape):,};"
            " download it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _idx_file(folder: Path, name: str) -> Path | None:
    """The file under its usual names: gzipped or not, "train-images-idx3-ubyte" or "train-images.idx3-ubyte"."""
    for stem in (name, name.replace("-idx", ".idx")):
        for path in (folder / stem, folder / f"{stem}.gz"):
            if path.is_file():
                return path
    return None


def _checked(*arrays: NDArray[np.uint8], where: str, source: str) -> Mnist:
    for part, images, labels in (("train", arrays[0], arrays[1]), ("test", arrays[2], arrays[3])):
        if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
            raise DataError(f"{where}: {part} images are {list(images.shape)} of {images.dtype}, MNIST has uint8 [N, 28, 28]")
        if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
            raise DataError(
                f"{where}: {len(images)} {part} images, but labels of shape {list(labels.shape)} and type {labels.dtype}"
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
            raise DataError(f"{where}: {part} labels go from {labels.min()} to {labels.max()}, MNIST has digits 0 to 9")
    return Mnist(arrays[0], arrays[1].astype(np.uint8), arrays[2], arrays[3].astype(np.uint8), source)
