"""Checkpoints that are whole or not there.

A checkpoint is a folder: `model.safetensors` (the weights to use), `config.json` (what it takes to build the model and to
read images for it), `trainer.safetensors` and `trainer.json` (what it takes to go on), and `manifest.json` with the SHA-256 of
each. It is written beside the old one, flushed to the disk, and then changes places with it in one system call; the old one
stays as `previous`. No pickle anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

MODEL, TRAINER, CONFIG, STATE, MANIFEST = (
    "model.safetensors",
    "trainer.safetensors",
    "config.json",
    "trainer.json",
    "manifest.json",
)
FORMAT = 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names it and says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds, checked against its manifest."""

    path: Path
    model: dict[str, Tensor]
    config: dict[str, Any]
    trainer: dict[str, Tensor]
    state: dict[str, Any]


def write_checkpoint(
    folder: Path, *, model: dict[str, Tensor], config: dict[str, Any], trainer: dict[str, Tensor], state: dict[str, Any]
) -> None:
    """Replaces the checkpoint `folder` by this one. Whenever the process dies, a whole checkpoint is there."""
    contents = {
        MODEL: save_tensors(_savable(model)),
        CONFIG: json.dumps(config, indent=1).encode(),
        TRAINER: save_tensors(_savable(trainer)),
        STATE: json.dumps(state).encode(),
    }
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    contents[MANIFEST] = json.dumps({"format": FORMAT, "sha256": sums}, indent=1).encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, previous = _partial(folder), _previous(folder)
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
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{folder}: cannot be saved ({error.strerror}); the last good checkpoint is kept") from error
    if folder.exists():
        _exchange(partial, folder, previous)
    else:
        partial.rename(folder)
    _sync(folder.parent)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks a checkpoint. Raises `CheckpointError` that names the file that is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no checkpoint here")
    sums = _json(folder / MANIFEST).get("sha256")
    if not isinstance(sums, dict) or set(sums) != {MODEL, CONFIG, TRAINER, STATE}:
        raise CheckpointError(f"{folder / MANIFEST}: not the manifest of a checkpoint")
    contents = {}
    for name, expected in sums.items():
        contents[name] = _bytes(folder / name)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise CheckpointError(f"{folder / name}: damaged (its SHA-256 is not that of the manifest)")
    try:
        return Checkpoint(
            path=folder,
            model=load_tensors(contents[MODEL]),
            config=json.loads(contents[CONFIG]),
            trainer=load_tensors(contents[TRAINER]),
            state=json.loads(contents[STATE]),
        )
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint ({error})") from error


def read_latest(folder: Path) -> Checkpoint:
    """The checkpoint `folder`, or the one before it if that is damaged or its replacement was cut short."""
    try:
        return read_checkpoint(folder)
    except CheckpointError as error:
        for other in (_partial(folder), _previous(folder)):
            try:
                return read_checkpoint(other)
            except CheckpointError:
                continue
        raise error


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever completed here, be it damaged now."""
    return folder.exists() or _previous(folder).exists()


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


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
        raise CheckpointError(f"{folder}: cannot be replaced ({os.strerror(code)}); the last good checkpoint is kept")
    # Systems and file systems without an exchange: a death between these two lines leaves both, and `read_latest` finds them.
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)
    partial.rename(folder)


def _savable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged (not JSON)") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged (not an object)")
    return value
