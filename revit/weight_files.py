"""Folders of tensors and JSON on the disk: whole or not there, read with a limit, no pickle anywhere."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

MODEL, CONFIG = "model.safetensors", "config.json"
MAX_TENSOR_BYTES = 8 * 2**30
MAX_JSON_BYTES = MAX_HEADER_BYTES = 10 * 2**20
"""Larger files are refused before they are read: no model and no description of ours comes near."""
PRECISIONS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class WeightFileError(ValueError):
    """A file that cannot be used. The message names it and says why."""


def write_folder(folder: Path, contents: Mapping[str, bytes], *, keep_previous: bool = False) -> None:
    """Replaces `folder` by one with these files. It is written beside the old one, flushed to the disk, and then changes places
    with it in one system call, so that whenever the process dies a whole folder is there. The old one stays if it is to be kept
    (`previous_folder`). Raises `OSError`, and then the old one is still there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, previous = partial_folder(folder), previous_folder(folder)
    if not folder.exists() and previous.exists() and partial.exists():
        partial.rename(folder)  # an earlier process died between the two renames of `_exchange`
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        for name, content in contents.items():
            with open(partial / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync(partial)
        if folder.exists():
            _exchange(partial, folder, previous)
        else:
            partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(folder.parent)
    if not keep_previous:
        shutil.rmtree(previous, ignore_errors=True)


def partial_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def previous_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file. Tensors that share memory are written each by itself."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save_tensors(whole, metadata)


def parse_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, whose header must describe its bytes exactly."""
    try:
        return load_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise WeightFileError(f"{path}: no whole safetensors file ({' '.join(str(error).split())[:200]})") from error


def precision(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The floating-point type of a model with these weights: that of most numbers. A file has its tensors in any order."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in PRECISIONS:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: (counts[dtype], str(dtype)), default=torch.float32)


def read_tensor_bytes(path: Path) -> bytes:
    """A safetensors file, whose header has at most 10 MiB and fits into it: a bomb is refused before it is read."""
    try:
        with open(path, "rb") as file:
            size, claimed = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise WeightFileError(f"{path}: cannot be read ({error.strerror})") from error
    if not 8 + claimed <= min(size, 8 + MAX_HEADER_BYTES):
        raise WeightFileError(f"{path}: no whole safetensors file (a header of {claimed:,} bytes in a file of {size:,})")
    return read_bytes(path, MAX_TENSOR_BYTES)


def parse_metadata(data: bytes) -> dict[str, str]:
    """The texts in the header of a safetensors file that `parse_tensors` has accepted."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__") or {}


def read_bytes(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would keep whoever opens it waiting
            raise WeightFileError(f"{path}: not a file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise WeightFileError(f"{path}: {size:,} bytes, at most {limit:,} are read")
            return file.read(size)
    except OSError as error:
        raise WeightFileError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        value = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except WeightFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{path}: damaged (not JSON)") from error
    if not isinstance(value, dict):
        raise WeightFileError(f"{path}: damaged (not an object)")
    return value


def _exchange(partial: Path, folder: Path, previous: Path) -> None:
    """Puts `partial` in the place of `folder`, which becomes `previous`."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None and swap(_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(folder), _RENAME_EXCHANGE) == 0:
        shutil.rmtree(previous, ignore_errors=True)
        partial.rename(previous)
        return
    code = ctypes.get_errno()
    if swap is not None and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code))
    # Systems and file systems without an exchange: a death between these two lines leaves both, to be found by who reads.
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)
    try:
        partial.rename(folder)
    except OSError:
        previous.rename(folder)
        raise


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
