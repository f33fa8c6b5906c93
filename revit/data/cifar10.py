"""CIFAR-10 from any of its forms: Python or binary batches, unpacked or as the archive, or an .npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from revit.data.archives import naming, read_tar
from revit.data.arrays import ArrayImages, counts, hold_out, named_file, open_npz_as
from revit.data.cifar_batches import Batch, read_binary, read_pickled
from revit.data.download import CIFAR10, dataset_folder, fetch
from revit.data.registry import register_dataset
from revit.data.spec import DataError, DataOptions, Dataset, DataSpec

RECORDS = 10_000  # images of a batch
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")  # order of batches.meta
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
BINARY = tuple(f"{name}.bin" for name in BATCHES)
UNPACKED = ("cifar-10-batches-py", "cifar-10-batches-bin")
PACKED = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
MAX_BATCH = 64 * 2**20  # bytes; batches have 31 million
MAX_BYTES = 2**30


def cifar10_spec(source: str) -> DataSpec:
    """What CIFAR-10 is. Mean and deviation as the released code has them."""
    return DataSpec("cifar10", 3, (32, 32), CLASSES, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), source)


@register_dataset("cifar10")
def open_cifar10(options: DataOptions) -> Dataset:
    """CIFAR-10: 50,000 / 10,000 images of ten classes, 32 x 32; some of the 50,000 are held out for validation."""
    folder = dataset_folder(options)
    path = named_file(options, folder) or _find(folder)
    if path is None and options.download:
        path = fetch(CIFAR10, folder)
    if path is None:
        raise DataError(
            f"{folder}: no CIFAR-10. Looked for the folders {' and '.join(UNPACKED)}, for {' and '.join(PACKED)} and for"
            f" cifar10*.npz. Put one of them here ({CIFAR10.url}), or add --data.download true"
        )
    if path.suffix == ".npz":
        return open_npz_as(path, options, cifar10_spec(path.name))
    batches = _batches(path)
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches[:5], strict=True))
    whole = ArrayImages(images, labels, "cifar10/train")
    splits = *hold_out(whole, options), ArrayImages(*batches[5], "cifar10/test")
    return Dataset(cifar10_spec(f"{path.name}: {counts(*splits)}"), *splits)


def _find(folder: Path) -> Path | None:
    """The folder of the batches, the archive or the .npz: what needs the least work first."""
    for place in (*(folder / name for name in UNPACKED), folder):
        if any((place / name).is_file() for name in (*BATCHES, *BINARY)):
            return place
    for path in (*(folder / name for name in PACKED), *sorted(folder.glob("cifar10*.npz"))):
        if path.is_file():
            return path
    return None


def _batches(path: Path) -> list[Batch]:
    """The five training batches and the test batch, from a folder or an archive."""
    if path.is_dir():
        files = {}
        for batch in (place for place in (path / name for name in (*BATCHES, *BINARY)) if place.is_file()):
            with naming(batch), open(batch, "rb") as file:
                files[batch.name] = file.read(MAX_BATCH)
    else:
        files = read_tar(path, (*BATCHES, *BINARY), MAX_BYTES)
    names, read = (BINARY, read_binary) if any(name in files for name in BINARY) else (BATCHES, read_pickled)
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(f"{path}: lacks {', '.join(missing)}; download {CIFAR10.url} again")
    return [read(files[name], f"{path}/{name}", RECORDS) for name in names]
