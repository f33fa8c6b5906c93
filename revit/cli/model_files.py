"""Models in files that hold their own code: ONNX and TorchScript, as modules from images to one output."""

from __future__ import annotations

import importlib
import os
import re
import stat
import warnings
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from revit.data.archives import checked_members, naming
from revit.data.image_files import printable

MAX_BYTES = 2 * 2**30
"""Larger files are refused: protobuf, and so ONNX, ends here, and no model of ours comes near."""

_PRECISIONS = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32, "tensor(double)": torch.float64}


class ModelFileError(ValueError):
    """A file whose model cannot be used. The message names it and says what to do."""


class OnnxModel(nn.Module):
    """An ONNX file on the CPU: images [B, C, H, W] to its output `logits`, or its first one.

    A batch size that the file has fixed is served piece by piece, the last one filled up with zeros. Weights beside the file
    are read from its own folder only, which onnxruntime sees to.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.shown = printable(path)
        _check_file(path)
        self.session = _onnx_session(path, self.shown)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4:
            found = ", ".join(f"{entry.name} {entry.shape}" for entry in inputs[:5]) or "none"
            raise ModelFileError(f"{self.shown}: takes one input of images [B, C, H, W], this has {found}; export it so")
        if not outputs:
            raise ModelFileError(f"{self.shown}: has no output; export it again")
        chosen = next((entry for entry in outputs if entry.name == "logits"), outputs[0])
        for entry, role in ((inputs[0], "input"), (chosen, "output")):
            if entry.type not in _PRECISIONS:
                raise ModelFileError(
                    f"{self.shown}: its {role} {entry.name} is {entry.type}; export it with float32, float16 or float64"
                )
        self.input, self.output = inputs[0].name, chosen.name
        batch, *shape = (size if isinstance(size, int) and size > 0 else None for size in inputs[0].shape)
        self.batch, self.input_shape = batch, tuple(shape)  # None where any size will do; the shape is (C, H, W)
        self.dtype = _PRECISIONS[inputs[0].type]
        # Not a weight: it tells whoever asks for the precision of the parameters in which one to feed this model.
        self.register_buffer("precision", torch.zeros((), dtype=self.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or any(size not in (None, got) for size, got in zip(self.input_shape, x.shape[1:], strict=True)):
            wanted = " x ".join("any" if size is None else str(size) for size in self.input_shape)
            got = " x ".join(map(str, x.shape[1:]))
            raise ModelFileError(f"{self.shown}: takes images of {wanted} (C x H x W), got {got}; give it such images")
        images = x.detach().to("cpu", self.dtype).contiguous().numpy()
        size = self.batch or max(1, len(images))
        outputs = [self._run(images[i : i + size], size) for i in range(0, max(1, len(images)), size)]
        return torch.from_numpy(np.concatenate(outputs)).to(x.device)

    def _run(self, images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        count = len(images)
        if self.batch is not None and count < size:
            images = np.concatenate([images, np.zeros((size - count, *images.shape[1:]), images.dtype)])
        try:
            output = np.asarray(self.session.run([self.output], {self.input: images})[0])
        except Exception as error:  # onnxruntime has its own exceptions, which have no base of their own
            raise ModelFileError(f"{self.shown}: fails on images {list(images.shape)} ({_reason(error)})") from error
        if output.shape[:1] != (len(images),):
            raise ModelFileError(
                f"{self.shown}: its output {self.output} has shape {list(output.shape)} for {len(images)} images;"
                " it must have a row for each"
            )
        return output[:count]

    def extra_repr(self) -> str:
        return f"{self.shown}, {self.input} -> {self.output}"


class ScriptModel(nn.Module):
    """A TorchScript file on the CPU. Its code is not Python: it has no named features and takes no hooks.

    But it is code, and torch says that a crafted file can do anything when it is loaded: open only files that you trust.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.shown = printable(path)
        _check_file(path)
        _check_script(path, self.shown)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"`torch\.jit\.load` is (deprecated|not supported)", DeprecationWarning)
                self.script = torch.jit.load(os.fspath(path), map_location="cpu")
        except Exception as error:
            raise ModelFileError(f"{self.shown}: cannot be loaded ({_reason(error)}); save it again") from error

    def forward(self, x: Tensor) -> Tensor:
        try:
            output = self.script(x)
        except Exception as error:
            raise ModelFileError(f"{self.shown}: fails on images {list(x.shape)} ({_reason(error, last=True)})") from error
        if not isinstance(output, Tensor):
            raise ModelFileError(f"{self.shown}: returns a {type(output).__name__}, not a tensor; save a module that does")
        return output


def _check_file(path: Path) -> None:
    shown = printable(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelFileError(f"{shown}: not a regular file; name the file of a model")
        with path.open("rb"):
            pass
    except OSError as error:
        raise ModelFileError(f"{shown}: cannot be read ({error.strerror}); check the name and its permissions") from error
    if found.st_size == 0:
        raise ModelFileError(f"{shown}: empty, it has 0 bytes; save or copy it again")
    if found.st_size > MAX_BYTES:
        raise ModelFileError(
            f"{shown}: {found.st_size:,} bytes, more than the {MAX_BYTES:,} that are read; use a smaller model"
        )


def _onnx_session(path: Path, shown: str) -> Any:
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise ModelFileError("onnxruntime is not installed; pip install 'revit-torch[export]'") from error
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        # By its path and not by its bytes: so onnxruntime keeps weights beside it within its folder.
        return runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelFileError(f"{shown}: not an ONNX model that can be run ({_reason(error)}); export it again") from error


def _check_script(path: Path, shown: str) -> None:
    """Refuses whatever is damaged or no TorchScript archive before torch looks at it: Python's pickle is never used."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PK\3\4":
            raise ModelFileError(f"{shown}: damaged, its end is missing; copy it again")
        raise ModelFileError(f"{shown}: {_NO_SCRIPT}")
    with naming(path, "save it again"), zipfile.ZipFile(path) as archive:
        names = [PurePosixPath(name).parts[1:] for name in checked_members(archive, path, MAX_BYTES)]
        is_script = ("constants.pkl",) in names and any(name[:1] == ("code",) for name in names)
        damaged = archive.testzip() if is_script else None
    if not is_script:
        raise ModelFileError(f"{shown}: {_NO_SCRIPT}")
    if damaged is not None:
        raise ModelFileError(f"{shown}: damaged ({printable(damaged)} is not what it was); copy it again")


_NO_SCRIPT = (
    "no TorchScript but a state dict or a pickle, which has no code and is not loaded; write a function that builds the model"
    " and loads the weights, and give package.module:factory"
)


def _reason(error: Exception, last: bool = False) -> str:
    """What a library says, as one short line. Where it prints a traceback, the last line says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[-1] if last else re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(lines))
    return printable(text.encode("utf-8", "replace").decode())[:300]
