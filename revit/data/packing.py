"""Making sharded archives of images that are files: the files as they are, in a fixed random order, and a description."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revit.data.cache import whole_file
from revit.data.image_files import MAX_BYTES, printable
from revit.data.randomness import permutation
from revit.data.registry import Progress
from revit.data.shards import ABOUT, FORMAT
from revit.data.spec import DataError, Dataset
from revit.data.tar_index import BLOCK

_PARTS = ("train", "val", "test")


def pack_dataset(dataset: Dataset, folder: Path, *, shard_bytes: int, progress: Progress | None = None) -> dict[str, int]:
    """Writes the archives of a dataset whose images are files into a new folder; returns how many of each part.

    Two packings of the same files are equal to the byte. The folder is there when all is written, or not at all.
    """
    if shard_bytes < 1:
        raise DataError(f"the size of a shard must be at least 1 byte, got {shard_bytes}")
    files = {part: _files(dataset, part) for part in _PARTS}
    total, done, archives = sum(len(paths) for paths, _ in files.values()), 0, dict[str, int]()
    with _whole_folder(folder) as partial:
        for part, (paths, labels) in files.items():
            archives[part] = 0
            for samples in _shards(paths, permutation(len(paths), "pack", part), shard_bytes):
                path = partial / f"{part}-{archives[part]:06}.tar"
                with whole_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                    for number, sample in samples:
                        _add(archive, number, paths[sample], int(labels[sample]))
                        done += 1
                        if progress is not None:
                            progress(done, total)
                archives[part] += 1
        spec = replace(
            dataset.spec, name="shards", source=f"{dataset.spec.source}; packed into {sum(archives.values())} archives"
        )
        counts = {part: len(paths) for part, (paths, _) in files.items()}
        floating = bool(dataset.train.read(0).dtype != np.uint8)
        about = {"format": FORMAT, "spec": spec.to_dict(), "floating": floating, "images": counts}
        with whole_file(partial / ABOUT) as file:
            file.write(json.dumps(about, indent=1).encode())
    return archives


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes its name only when the block has ended well."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{printable(folder)}: {'holds files already' if folder.is_dir() else 'a file'}; choose a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            yield partial
            os.chmod(partial, folder.parent.stat().st_mode & 0o777)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: cannot be written ({error.strerror}); make room, or choose another folder"
        ) from error


def _files(dataset: Dataset, part: str) -> tuple[Sequence[str], NDArray[np.int64]]:
    images = dataset.split(part)
    paths = getattr(images, "paths", None)
    if paths is None:
        raise DataError(f"{dataset.spec.name}: its images are no files of their own; only folder and imagenet can be packed")
    return paths, images.labels


def _shards(paths: Sequence[str], order: NDArray[np.int64], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs (number, sample) of each archive: as many as fit into the limit, at least one."""
    shard, size = list[tuple[int, int]](), 2 * BLOCK  # the mark of the end
    for number, sample in enumerate(order.tolist()):
        found = _size(paths[sample])
        if found > MAX_BYTES:
            raise DataError(
                f"{printable(paths[sample])}: {found} bytes, more than the {MAX_BYTES} that are read; store it smaller"
            )
        needed = 3 * BLOCK + -(-found // BLOCK) * BLOCK  # two headers, the image, the label
        if shard and -(-(size + needed) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE > limit:
            yield shard
            shard, size = [], 2 * BLOCK
        shard.append((number, sample))
        size += needed
    if shard:
        yield shard


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); mend or remove it") from error


def _add(archive: tarfile.TarFile, number: int, path: str, label: int) -> None:
    """An image file and its label, under a name that begins with the number and goes on with what was its name."""
    stem, suffix = os.path.splitext(os.path.basename(path))
    key = f"{number:08}_{re.sub(r'[^A-Za-z0-9_-]', '-', printable(stem))[:60]}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); mend or remove it") from error
    for name, data in ((key + suffix.lower(), content), (f"{key}.cls", str(label).encode())):
        member = tarfile.TarInfo(name)  # no time, no owner: equal files make equal archives
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
