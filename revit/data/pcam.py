"""PatchCamelyon (Veeling et al. 2018): patches of lymph nodes, with or without tumour in their centre."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.archives import naming, unpack_gzip
from revit.data.arrays import counts, named_file, open_npz_as
from revit.data.download import PCAM, Remote, dataset_folder, fetch
from revit.data.registry import register_dataset
from revit.data.resize import crop_and_resize
from revit.data.spec import BadImage, Crop, DataError, DataOptions, Dataset, DataSpec, Pixels

SIDE = 96
MAX_BYTES = 16 * 2**30  # the largest file, train_x, unpacks to 7.2 GB
MAX_IMAGES = 10_000_000
PARTS = ("train", "val", "test")  # in the order of PCAM; the released code calls its valid split "test"
_AGAIN = "download it again"


def pcam_spec(source: str) -> DataSpec:
    """What PatchCamelyon is. Mean and deviation as the released code has them."""
    return DataSpec("pcam", 3, (SIDE, SIDE), ("normal", "tumor"), (0.701, 0.538, 0.692), (0.235, 0.277, 0.213), source)


class HDF5Images:
    """A split in two HDF5 files, read image by image. Each process opens the file for itself: handles do not survive a fork."""

    def __init__(self, images: Path, labels: Path, prefix: str) -> None:
        self.path, self.prefix = images, prefix
        self._file: Any = None
        self._process = 0
        self.labels = _read_labels(labels)
        with _opened(images) as file:
            shape, dtype = _dataset(file, "x", images).shape, _dataset(file, "x", images).dtype
        if len(shape) != 4 or shape[1:] != (SIDE, SIDE, 3) or dtype != np.uint8:
            raise DataError(
                f"{images}: x is {list(shape)} of {dtype}, PatchCamelyon has uint8 [N, {SIDE}, {SIDE}, 3]; {_AGAIN}"
            )
        if shape[0] != len(self.labels):
            raise DataError(
                f"{images}: {shape[0]:,} images, but {labels.name} has {len(self.labels):,} labels; download both again"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}  # for workers that are spawned

    def name(self, index: int) -> str:
        return f"{self.prefix}/{index}"

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        if self._file is None or self._process != os.getpid():
            self._file, self._process = _opened(self.path), os.getpid()
        try:
            image: NDArray[np.uint8] = self._file["x"][index]  # [H, W, C]
        except OSError as error:
            raise BadImage(f"{self.name(index)}: cannot be read from {self.path} ({error}); {_AGAIN}") from error
        return np.ascontiguousarray(crop_and_resize(image.transpose(2, 0, 1), (SIDE, SIDE), crop))


def _opened(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{path}: HDF5 files need the package h5py: pip install 'revit-torch[train]'") from error
    with naming(path, _AGAIN):
        return h5py.File(path, "r")


def _dataset(file: Any, key: str, path: Path) -> Any:
    import h5py

    if not isinstance(file.get(key, getlink=True), h5py.HardLink) or not isinstance(file[key], h5py.Dataset):
        raise DataError(f"{path}: has no dataset {key!r}, only {', '.join(file) or 'nothing'}; {_AGAIN}")
    dataset = file[key]
    if dataset.external or dataset.is_virtual:
        raise DataError(
            f"{path}: {key!r} names other files to read from, which the official files do not; do not use this file"
        )
    if not 1 <= math.prod(dataset.shape[:1]) <= MAX_IMAGES:
        raise DataError(
            f"{path}: {key!r} has shape {list(dataset.shape or ())}, between 1 and {MAX_IMAGES:,} images are read; {_AGAIN}"
        )
    return dataset


def _read_labels(path: Path) -> NDArray[np.int64]:
    with _opened(path) as file:
        dataset = _dataset(file, "y", path)
        if dataset.dtype.kind not in "iu" or dataset.size != len(dataset):
            raise DataError(
                f"{path}: y is {list(dataset.shape)} of {dataset.dtype}, PatchCamelyon has uint8 [N, 1, 1, 1]; {_AGAIN}"
            )
        with naming(path, _AGAIN):
            labels = dataset[()].reshape(-1).astype(np.int64)
    if not np.isin(labels, (0, 1)).all():
        raise DataError(
            f"{path}: labels must be 0 (normal) or 1 (tumor), got {', '.join(map(str, np.unique(labels)[:5]))}; {_AGAIN}"
        )
    return labels


@register_dataset("pcam")
def open_pcam(options: DataOptions) -> Dataset:
    """PatchCamelyon: 262,144 / 32,768 / 32,768 patches of lymph nodes, 96 x 96, normal or tumor (needs h5py)."""
    root = dataset_folder(options)
    # The second is where torchvision puts it.
    folder = next((place for place in (root, root / "pcam") if any(_here(place, remote.name) for remote in PCAM)), None)
    archive = named_file(options, root)
    if archive is None and folder is None and not options.download:
        archive = next(iter(sorted(root.glob("pcam*.npz"))), None)
    if archive is not None:
        return open_npz_as(archive, options, pcam_spec(archive.name))
    files = [_hdf5_file(folder or root, remote, options.download) for remote in PCAM]
    train, val, test = (HDF5Images(files[2 * i], files[2 * i + 1], f"pcam/{part}") for i, part in enumerate(PARTS))
    return Dataset(pcam_spec(f"camelyonpatch_level_2: {counts(train, val, test)}"), train, val, test)


def _here(folder: Path, packed: str) -> bool:
    return (folder / packed).is_file() or (folder / packed.removesuffix(".gz")).is_file()


def _hdf5_file(folder: Path, remote: Remote, download: bool) -> Path:
    """The file, unpacked beside its .gz if need be, downloaded if the user asked for that."""
    packed = folder / remote.name
    path = packed.with_suffix("")
    if path.is_file():
        return path
    if download:
        fetch(remote, folder)
    if not packed.is_file():
        raise DataError(
            f"{path}: no such file (nor {packed.name}). PatchCamelyon is six files,"
            f" camelyonpatch_level_2_split_{{train,valid,test}}_{{x,y}}.h5, from {PCAM[0].url.rpartition('/')[0]},"
            " or one pcam*.npz. Put them here, or add --data.download true"
        )
    unpack_gzip(packed, path, MAX_BYTES)
    return path
