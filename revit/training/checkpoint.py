"""Checkpoints that are whole or not there.

A checkpoint is a folder: `model.safetensors` (the weights to use), `config.json` (what it takes to build the model and to
read images for it), `trainer.safetensors` and `trainer.json` (what it takes to go on), and `manifest.json` with the SHA-256 of
each. It is written beside the old one, flushed to the disk, and then changes places with it in one system call; the old one
stays as `previous`. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, isfinite

from revit.weight_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MODEL,
    WeightFileError,
    parse_tensors,
    partial_folder,
    previous_folder,
    read_bytes,
    read_json,
    read_tensor_bytes,
    tensor_bytes,
    write_folder,
)

TRAINER, STATE, MANIFEST = "trainer.safetensors", "trainer.json", "manifest.json"
FORMAT = 1


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
    """Replaces the checkpoint `folder` by this one. Whenever the process dies, a whole checkpoint is there.

    Weights that are no numbers are not saved: they would take the place of good ones.
    """
    for tensors in (model, trainer):
        _check_finite(folder, tensors, "the last good checkpoint is kept")
    contents = {
        MODEL: tensor_bytes(model),
        CONFIG: json.dumps(config, indent=1).encode(),
        TRAINER: tensor_bytes(trainer),
        STATE: json.dumps(state).encode(),
    }
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    contents[MANIFEST] = json.dumps({"format": FORMAT, "sha256": sums}, indent=1).encode()
    try:
        write_folder(folder, contents, keep_previous=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be saved ({error.strerror}); the last good checkpoint is kept") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks a checkpoint. Raises `CheckpointError` that names the file that is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no checkpoint here")
    try:
        return _read(folder)
    except WeightFileError as error:
        raise CheckpointError(str(error)) from error


def _read(folder: Path) -> Checkpoint:
    manifest = read_json(folder / MANIFEST)
    sums = manifest.get("sha256")
    if set(manifest) != {"format", "sha256"} or not isinstance(sums, dict) or set(sums) != {MODEL, CONFIG, TRAINER, STATE}:
        raise CheckpointError(f"{folder / MANIFEST}: not the manifest of a checkpoint")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST}: of format {manifest['format']!r}, this version reads {FORMAT}")
    contents = {}
    for name, expected in sums.items():
        holds_tensors = name in (MODEL, TRAINER)
        contents[name] = read_tensor_bytes(folder / name) if holds_tensors else read_bytes(folder / name, MAX_JSON_BYTES)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise CheckpointError(f"{folder / name}: damaged (its SHA-256 is not that of the manifest)")
    try:
        checkpoint = Checkpoint(
            path=folder,
            model=parse_tensors(contents[MODEL], folder / MODEL),
            config=json.loads(contents[CONFIG]),
            trainer=parse_tensors(contents[TRAINER], folder / TRAINER),
            state=json.loads(contents[STATE]),
        )
    except WeightFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint ({error})") from error
    if not isinstance(checkpoint.config, dict) or not isinstance(checkpoint.state, dict):
        raise CheckpointError(f"{folder}: not a checkpoint ({CONFIG} and {STATE} hold objects)")
    for tensors in (checkpoint.model, checkpoint.trainer):
        _check_finite(folder, tensors, "use another checkpoint")
    return checkpoint


def _check_finite(folder: Path, tensors: dict[str, Tensor], then: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not isfinite(tensor).all():
            raise CheckpointError(f"{folder}: {name} has values that are not finite numbers; {then}")


def read_latest(folder: Path) -> Checkpoint:
    """The checkpoint `folder`, or the one before it if that is damaged or its replacement was cut short."""
    try:
        return read_checkpoint(folder)
    except CheckpointError as error:
        for other in (partial_folder(folder), previous_folder(folder)):
            try:
                return read_checkpoint(other)
            except CheckpointError:
                continue
        raise error


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever completed here, be it damaged now."""
    return folder.exists() or previous_folder(folder).exists()
