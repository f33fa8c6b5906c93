"""Files that `torch.save` wrote, read without running anything that is in them."""

from __future__ import annotations

import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from revit.conversion.state import ConversionError, shown
from revit.data.archives import checked_members
from revit.data.image_files import printable

MAX_BYTES = 16 * 2**30
"""Of a file, and of all its tensors: the largest released preset with its expanded filters stays below."""
MAX_PICKLE = 64 * 2**20
"""Of the names, shapes and numbers of a file: those of large models have a few hundred kilobytes."""
_KINDS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool))
_SAVE_AGAIN = "save the state dict alone: torch.save(model.state_dict(), FILE)"


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors by name, and the epoch that they are of (0 if the file does not say).

    Takes the files of the released training code, which hold the state dict under `model_state_dict`, and a state dict alone.
    Whatever is no plain tensor on the CPU within the memory of the file is refused, before its numbers are read.
    """
    name = printable(path)
    _check_archive(path, name)
    try:
        # Mapped, not read: a shape that claims more than there is fails instead of taking memory.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # hostile bytes raise whatever they like
        raise ConversionError(f"{name}: {_reason(error)}; {_SAVE_AGAIN}") from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{name}: holds a {type(loaded).__name__}, not a state dict; {_SAVE_AGAIN}")
    epoch = loaded.get("epoch")
    tensors = loaded.get("model_state_dict", loaded)
    if not isinstance(tensors, Mapping) or not tensors:
        raise ConversionError(f"{name}: its model_state_dict is {'empty' if not tensors else 'no dict'}; {_SAVE_AGAIN}")
    return _checked(tensors, name), epoch if isinstance(epoch, int) and 0 <= epoch < 10**9 else 0


def _check_archive(path: Path, name: str) -> None:
    """Looks at the directory and the checksums of the file, not at what is in it."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ConversionError(f"{name}: not a regular file; name the file of a checkpoint")
        if found.st_size > MAX_BYTES:
            raise ConversionError(f"{name}: {found.st_size:,} bytes, at most {MAX_BYTES:,} are read")
        if not zipfile.is_zipfile(path):
            raise ConversionError(f"{name}: not a file of torch.save in its zip form, or cut short; copy or save it again")
        with zipfile.ZipFile(path) as archive:
            members = checked_members(archive, path, MAX_BYTES)
            damaged = archive.testzip() if _is_stored(members) else None
    except OSError as error:
        raise ConversionError(f"{name}: cannot be read ({error.strerror}); check the name and its permissions") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{name}: damaged ({printable(str(error))}); copy it again") from error
    inner = {PurePosixPath(member).parts[1:]: info for member, info in members.items()}
    if ("constants.pkl",) in inner:
        raise ConversionError(f"{name}: TorchScript, which is code; {_SAVE_AGAIN}")
    if ("data.pkl",) not in inner:
        raise ConversionError(f"{name}: a zip archive, but none of torch.save; name the file of a checkpoint")
    if inner["data.pkl",].file_size > MAX_PICKLE:
        raise ConversionError(f"{name}: {inner['data.pkl',].file_size:,} bytes of names and shapes; {_SAVE_AGAIN}")
    if not _is_stored(members):
        raise ConversionError(f"{name}: compressed, which torch.save never does; unpack it or save it again")
    if damaged is not None:
        raise ConversionError(f"{name}: damaged ({printable(damaged)} is not what it was); copy it again")


def _is_stored(members: Mapping[str, zipfile.ZipInfo]) -> bool:
    return all(info.compress_type == zipfile.ZIP_STORED for info in members.values())


def _checked(tensors: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    total = 0
    for key, tensor in tensors.items():
        if not isinstance(key, str):
            raise ConversionError(f"{name}: a {type(key).__name__} stands where the name of a tensor should; {_SAVE_AGAIN}")
        if not isinstance(tensor, Tensor):
            raise ConversionError(f"{name}: {shown(key)} is a {type(tensor).__name__}, not a tensor; {_SAVE_AGAIN}")
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dtype in _KINDS
        size = tensor.numel() * tensor.element_size()
        total += size
        if not plain or size > tensor.untyped_storage().nbytes() or total > MAX_BYTES:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)[:8]}"
            raise ConversionError(f"{name}: {shown(key)} ({kind}) is no ordinary tensor of this file; {_SAVE_AGAIN}")
    return {key: tensor.detach() for key, tensor in tensors.items()}


def _reason(error: Exception) -> str:
    """What is wrong, in our words: torch's text goes on for lines and recommends to trust the file."""
    found = re.search(r"unsupported global:? (?:GLOBAL )?([\w.]+)", str(error), flags=re.IGNORECASE)
    if found:
        return f"refused, for it holds more than tensors ({found[1][:100]})"
    return "damaged, or holds more than tensors"
