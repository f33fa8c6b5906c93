"""Models for other programs: ONNX, or torch.export's `.pt2`. What is exported was run again and compared first.

A model is deployed (`revit.deploy`), traced for any batch size and, where it allows that, any height and width, and translated
in memory. The bytes are loaded as a user would load them, run, and compared with the model itself; only then they are returned,
to be saved. A traced model is valid for the sizes that take the same way through it (the same padding, the same windows): the
`sizes` of an export are those of them at which the model is exact.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from revit.deployment import deploy
from revit.deployment.canonical import BitExact
from revit.evaluation.inference import evaluating
from revit.int8 import quantise_weights
from revit.slimming import slim

FORMATS = ("onnx", "torch-export")
TOLERANCE = 1e-5
"""How far a file may be from its model: the largest difference by the largest value."""
CHECKED_SIZES = 4
"""Sizes at which a file for any size is run."""
Run = Callable[[Tensor], Tensor]
Size = tuple[int, int]


class ExportError(ValueError):
    """A model that cannot be exported. The message says why."""


@dataclass(frozen=True)
class Exported:
    """A file in memory, and what is known of it."""

    data: bytes = field(repr=False)
    format: str
    size: Size  # of the images that it was traced with
    any_size: bool  # whether height and width are free, within `sizes`
    sizes: tuple[Size, ...]  # at which the model is exact and the file valid, from half to twice the size
    checked_sizes: tuple[Size, ...]  # at which file and model were compared
    difference: float  # the largest of them, of the float32 file
    weight_bytes: int  # of the expanded weights in float32
    agreement: float | None  # share of the images with the same predicted class, if weights are int8

    def load(self) -> nn.Module:
        """The file as a module from images to logits, run as whoever gets it would run it."""
        return _FileModel(_load(self.data, self.format))


class _FileModel(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def export_model(
    model: nn.Module, images: Tensor, *, format: str = "onnx", int8: bool = False, any_size: bool = True
) -> Exported:
    """Exports a model in float32, for images like those given, [B, C, H, W] normalised.

    `any_size` keeps height and width free where that works, which takes several times as long to trace. `int8` (ONNX alone)
    writes weights of 8 bits, which are multiplied out when the file is run. `ExportError` says what cannot be translated, or
    gives other results.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}; choose {', '.join(FORMATS)}")
    if int8 and format != "onnx":
        raise ExportError(f"weights of 8 bits are for ONNX, got {format}; choose onnx, or leave int8 out")
    if isinstance(model, BitExact):
        raise ExportError("a file has no bit-exact mode, which needs this library; export the model that it was made from")
    if images.ndim != 4 or len(images) < 2:
        raise ExportError(f"expected at least two images [B, C, H, W], got shape {list(images.shape)}")
    for name in ("onnx", "onnxscript", "onnxruntime") if format == "onnx" else ():
        if importlib.util.find_spec(name) is None:
            raise ExportError(f"{name} is not installed; pip install 'revit-torch[export]'")
    images = images.detach().float().cpu()
    eager = copy.deepcopy(model).cpu().float()
    plain = deploy(eager)
    weights = sum(4 * parameter.numel() for parameter in plain.parameters())
    size: Size = (images.shape[-2], images.shape[-1])
    for free in (True, False) if any_size else (False,):
        try:
            program = _trace(plain, images[:3], free)
            sizes = _valid_sizes(program, eager, images, free)
            if free and len(sizes) < 2:
                continue
            data = _translate(program, format)
            checked = _spread(sizes, size) if free else [size]
            difference = _compare(_load(data, format), eager, images, checked)
            agreement = None
            if int8:
                data = quantise_weights(data)
                agreement = _agreement(_load(data, format), eager, images)
        except Exception as error:  # of tracing, translating or running: each library has its own
            if not free:
                raise ExportError(f"{type(model).__name__} cannot be exported as {format}: {_why(error)}") from error
        else:
            return Exported(data, format, size, free, tuple(sizes), tuple(checked), difference, weights, agreement)
    raise AssertionError("the last try returns or raises")


def _trace(plain: nn.Module, images: Tensor, any_size: bool) -> ExportedProgram:
    free = {0: Dim.DYNAMIC, **({2: Dim.AUTO, 3: Dim.AUTO} if any_size else {})}
    with _silence(), evaluating(plain):
        plain(images)  # tables that are made once must not be made of traced numbers
        return torch.export.export(plain, (images,), dynamic_shapes=(free,), strict=False)


def _translate(program: ExportedProgram, format: str) -> bytes:
    if format == "torch-export":
        _forget_source(program)
        buffer = io.BytesIO()
        with _silence():
            torch.export.save(program, buffer)
        return buffer.getvalue()
    with _silence():
        made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["images"], output_names=["logits"])
    assert made is not None
    return slim(made.model_proto).SerializeToString()


def _forget_source(program: ExportedProgram) -> None:
    """Removes the lines of code that each operation came from, which name folders of this machine, and the traced images."""
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
    program.example_inputs = None


def _load(data: bytes, format: str) -> Run:
    """The file as a function of images, from its bytes."""
    if format == "torch-export":
        program = torch.export.load(io.BytesIO(data)).module()
        return lambda x: program(x)
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _valid_sizes(program: ExportedProgram, model: Any, images: Tensor, any_size: bool) -> list[Size]:
    """Square sizes from half to twice the given one, and that one, at which the model is exact and the trace valid."""
    given: Size = (images.shape[-2], images.shape[-1])
    if not any_size:
        return [given] if _is_exact(model, given) else []
    run, side = program.module(), max(given)
    sizes = sorted({given, *((n, n) for n in range(max(1, side // 2), 2 * side + 1))})
    return [size for size in sizes if _is_exact(model, size) and _is_valid(run, images.new_zeros(1, images.shape[1], *size))]


def _is_exact(model: Any, size: Size) -> bool:
    """Whether a model is exact at a size; one that does not say is exact at every size that it takes."""
    if not hasattr(model, "check_input_size"):
        return True
    try:
        with _strict(model):
            model.check_input_size(*size)
    except ValueError:
        return False
    return True


@contextmanager
def _strict(model: nn.Module) -> Iterator[None]:
    """Layers that would only warn of a size raise."""
    found = [guard.strictness for m in model.modules() for guard in vars(m).values() if hasattr(guard, "strictness")]
    before = [strictness.strict for strictness in found]
    for strictness in found:
        strictness.strict = True
    try:
        yield
    finally:
        for strictness, strict in zip(found, before, strict=True):
            strictness.strict = strict


def _is_valid(run: Any, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            run(x)
    except (AssertionError, RuntimeError):  # a guard of the trace, or a shape that does not fit
        return False
    return True


def _spread(sizes: list[Size], given: Size) -> list[Size]:
    """A few of the sizes: the given one, the smallest, the largest, and some between."""
    step = max(1, (len(sizes) - 1) // (CHECKED_SIZES - 1))
    return sorted({given, *sizes[::step][: CHECKED_SIZES - 1], sizes[-1]})


def _compare(run: Run, model: nn.Module, images: Tensor, sizes: list[Size]) -> float:
    """The largest relative difference of file and model: for all images, for one, and for noise of each size."""
    generator = torch.Generator().manual_seed(0)
    batches = [images, images[:1]]
    batches += [torch.randn(2, images.shape[1], *size, generator=generator) for size in sizes]
    worst = 0.0
    for x in batches:
        with _silence(), evaluating(model):
            expected, found = model(x), run(x)
        difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if not difference <= TOLERANCE:
            raise ExportError(f"the file differs from the model by {difference:.1e} at {x.shape[-2]} x {x.shape[-1]}")
        worst = max(worst, difference)
    return worst


def _agreement(run: Run, model: nn.Module, images: Tensor) -> float:
    same = 0.0
    for x in images.split(64):
        with _silence(), evaluating(model):
            same += float((run(x).argmax(1) == model(x).argmax(1)).double().mean()) * len(x)  # of maps: of their pixels
    return same / len(images)


@contextmanager
def _silence() -> Iterator[None]:
    """What exporters say on the way is about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _why(error: BaseException | None) -> str:
    """One line; where an operation is missing, its name."""
    causes = []
    while error is not None:
        causes.append(" ".join(str(error).split()))
        error = error.__cause__ or error.__context__
    missing = re.search(r"No ONNX function found for .*?op='([\w.]+)'", " ".join(causes))
    return f"it has no operation {missing[1]}" if missing else causes[0][:300]
