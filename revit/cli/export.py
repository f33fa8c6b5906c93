"""`revit export`: a model as a file for other programs, run again, compared and audited before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from torch import Tensor

from revit.cli.model_files import OnnxModel, ScriptModel
from revit.cli.parser import Parser, UsageError
from revit.cli.report import choose_images, write_json
from revit.cli.runs import run_data
from revit.cli.scanning import open_with_progress
from revit.cli.subjects import Subject, open_subject
from revit.cli.weights import export_weights
from revit.data.cache import whole_file
from revit.data.file_images import Fit
from revit.data.spec import DataError
from revit.data.unlabelled import open_images
from revit.evaluation import audit_model
from revit.export import FORMATS, Exported, ExportError, export_model
from revit.training.recipe import ModelOptions
from revit.training.run_folder import environment

USAGE = "RUN|MODEL --out FILE [--format onnx|torch-export|weights] [--int8] [--images FILES] [--size N]"
ABOUT = """Writes a trained run, or a registered model with random weights, as plain convolutions and matrix products for any
batch size, and for any height and width where the model allows it. Before FILE appears, it is run (ONNX in onnxruntime),
compared with the model and audited. A JSON file of the same name beside it holds the classes, the normalisation and the sizes
at which the file is exact. `--format weights` writes a finished run as a folder for `revit.from_pretrained`: weights, config,
and a model card with the results."""
WEIGHTS = "weights"
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
LIMIT = 1e-4
"""Relative error under an exact turn or mirror that a float32 file may have, where the model itself has no more."""


def run(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.samples < 2:
        raise UsageError(f"--samples must be at least 2, got {options.samples}")
    path = Path(options.out)
    if options.format == WEIGHTS:
        if options.int8 or options.checkpoint != "best":
            raise UsageError("--format weights writes the best epoch as it is: leave --int8 and --checkpoint out")
        export_weights(Path(options.subject), path, Console())
        return 0
    if path.suffix != SUFFIXES[options.format] or path.is_dir():
        raise UsageError(f"--out {options.out}: {options.format} is written to a file that ends in {SUFFIXES[options.format]}")
    console = Console()
    subject = _subject(options)
    images, source = _images(subject, options, console)
    exported = export_model(subject.model, images, format=options.format, int8=options.int8, any_size=not options.fixed_size)
    audit = _audit(subject, exported, images)
    with whole_file(path) as file:
        file.write(exported.data)
    facts = _facts(subject, exported, source)
    write_json(path.with_suffix(".json"), {"file": path.name, **facts, "audit": audit, **environment()})
    _report(console, path, exported, audit, source)
    return 0


def _parser() -> Parser:
    parser = Parser("export", USAGE, ABOUT)
    parser.add_argument("subject", metavar="RUN|MODEL", type=str, help="run, weights, model or package.module:factory")
    parser.add_argument(
        "--out", metavar="FILE", type=str, required=True, help="file to write, .onnx or .pt2, or a folder for weights"
    )
    parser.add_argument(
        "--format",
        default="onnx",
        choices=[*FORMATS, WEIGHTS],
        help="for onnxruntime and others, for torch, or to load and train on",
    )
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits (ONNX): a quarter of the size")
    parser.add_argument("--fixed-size", action="store_true", help="for images of one size only, which is faster to export")
    parser.add_argument(
        "--images", metavar="FILES", type=str, help="image files to compare with (default: the run's test split)"
    )
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data, if it is not where it was")
    parser.add_argument("--samples", metavar="N", type=int, default=64, help="images to compare and audit with")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights of a run")
    parser.add_argument("--size", metavar="N", type=int, help="side of the images of a model that is no run")
    parser.add_argument("--channels", metavar="N", type=int, default=3, help="channels of a registered model")
    parser.add_argument("--classes", metavar="N", type=int, default=1000, help="classes of a registered model")
    parser.add_argument("--model.group", dest="model_group", metavar="GROUP", type=str, help="group of a registered model")
    parser.add_section("model", skip=frozenset({"name", "group"}))
    return parser


def _subject(options: Namespace) -> Subject:
    model_options = ModelOptions(name=options.subject, **{**vars(options.model), "group": options.model_group})
    subject = open_subject(
        options.subject, model_options, in_chans=options.channels, num_classes=options.classes, checkpoint=options.checkpoint
    )
    if isinstance(subject.model, OnnxModel | ScriptModel):
        raise UsageError(f"{subject.label}: already a file; name a run folder or a model")
    if subject.spec is None and options.size is None:
        raise UsageError(f"{subject.label} is no run, so give the side of its images: --size 28")
    return subject


def _images(subject: Subject, options: Namespace, console: Console) -> tuple[Tensor, str]:
    """Normalised images [N, C, H, W], and what they are."""
    spec = subject.spec
    if spec is None:
        if options.images is not None:
            raise UsageError("--images needs a run, which knows how its images are normalised")
        channels = getattr(subject.model, "in_chans", options.channels)
        return _noise(options.samples, channels, (options.size, options.size)), "noise"
    if options.images is not None:
        files = open_images([options.images], Fit(spec.channels, spec.size, floating=True))
        return choose_images([files], spec, options.samples), f"image files {Path(options.images).name}"
    assert subject.run is not None
    try:
        dataset = open_with_progress(run_data(subject.run, options.data_root, None), console)
    except DataError as error:
        if options.data_root is not None:
            raise
        console.print(f"the data of the run is not here ({error}): noise instead", highlight=False, soft_wrap=True)
        return _noise(options.samples, spec.channels, spec.size), "noise"
    return choose_images([dataset.split("test"), dataset.split("val")], spec, options.samples), dataset.spec.source


def _noise(count: int, channels: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(0))


def _audit(subject: Subject, exported: Exported, images: Tensor) -> dict[str, Any] | None:
    """What turns and mirrors do to the answers of the file. It must keep what the model has."""
    if subject.group is None:
        return None
    found, expected = (audit_model(model, images, subject.group) for model in (exported.load(), subject.model))
    worst, before = found.worst("logits"), expected.worst("logits")
    if worst > LIMIT >= before:
        raise ExportError(
            f"{subject.label}: the file has lost the symmetry of the model under {subject.group}: its answers change by"
            f" {worst:.1e}, those of the model by {before:.1e}; nothing was written"
        )
    return {
        "group": subject.group,
        "largest_error": worst,
        "largest_error_of_the_model": before,
        "same_predictions_percent": found.mean_consistency_percent,
    }


def _facts(subject: Subject, exported: Exported, source: str) -> dict[str, Any]:
    spec = subject.spec
    height, width = ("height", "width") if exported.any_size else exported.size
    channels = spec.channels if spec is not None else getattr(subject.model, "in_chans", None)
    return {
        "model": subject.label,
        "format": exported.format,
        "group": subject.group,
        "classes": list(spec.classes) if spec is not None else None,
        "input": {"name": "images", "shape": ["batch", channels, height, width], "dtype": "float32"},
        "normalisation": {"mean": list(spec.mean), "std": list(spec.std), "of": "values from 0 to 1"}
        if spec is not None
        else None,
        "size": list(exported.size),
        "exact_sizes": [list(size) for size in exported.sizes],
        "compared": {
            "images": source,
            "sizes": [list(size) for size in exported.checked_sizes],
            "largest_difference": exported.difference,
        },
        "int8": None if exported.agreement is None else {"same_predictions_percent": 100 * exported.agreement},
        "bytes": len(exported.data),
        "float32_weight_bytes": exported.weight_bytes,
    }


def _report(console: Console, path: Path, exported: Exported, audit: dict[str, Any] | None, source: str) -> None:
    sizes = ", ".join(f"{height} x {width}" for height, width in exported.sizes)
    free = f"any size of {sizes}" if exported.any_size else f"{exported.size[0]} x {exported.size[1]} pixels"
    weights = len(exported.data) / exported.weight_bytes
    lines = [
        f"{path}: {len(exported.data):,} bytes ({weights:.2f} of the float32 weights), any batch, {free}",
        f"  answers differ from the model by {exported.difference:.1e} ({source})",
    ]
    if exported.agreement is not None:
        lines.append(f"  with weights of 8 bits {100 * exported.agreement:.2f} % of the predictions are the same ({source})")
    if audit is not None:
        lines.append(
            f"  under {audit['group']} they change by {audit['largest_error']:.1e},"
            f" {audit['same_predictions_percent']:.2f} % of the predictions stay"
        )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
