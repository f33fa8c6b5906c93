"""Arrays from .npz files that others made, and arrays that were computed once and are kept in the cache folder."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from revit.data.archives import checked_members, naming
from revit.data.cache import cache_folder, whole_file
from revit.data.spec import DataError

MAX_BYTES = 32 * 2**30


def read_arrays(path: Path, keys: Collection[str], fix: str = "save it again with numpy.savez") -> dict[str, NDArray[Any]]:
    """Those of the named arrays that an .npz holds. Others in it are not touched, and no pickle is ever loaded."""
    with naming(path, fix), zipfile.ZipFile(path) as archive:
        members = checked_members(archive, path, MAX_BYTES)
        return {key: _read(archive, members[f"{key}.npy"], path, key) for key in keys if f"{key}.npy" in members}


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, key: str) -> NDArray[Any]:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise DataError(f"{path}: {key} is in .npy format {version}; save it as a plain array of numbers")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise DataError(f"{path}: {key} holds Python objects, which are not loaded; save it as a plain array of numbers")
        # numpy allocates what this header says, so it must agree with the size that was checked.
        if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
            raise DataError(f"{path}: {key} says shape {list(shape)} but holds {member.file_size:,} bytes; save it again")
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def file_identity(path: Path) -> tuple[str, int, int]:
    """What changes when a file does: part of the key of everything computed from it."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def load_arrays(name: str, expected: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> dict[str, NDArray[Any]] | None:
    """Arrays kept under this name if all are there, whole, and of the expected shapes and types; else nothing."""
    try:
        arrays = read_arrays(cache_folder() / name, expected)
    except DataError:
        return None
    for key, (shape, dtype) in expected.items():
        if key not in arrays or arrays[key].shape != shape or arrays[key].dtype != np.dtype(dtype):
            return None
    return arrays


def keep_arrays(name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Keeps arrays. A cache that cannot be written costs time, not the result: it is left out."""
    try:
        with whole_file(cache_folder() / name) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError:
        return
