"""`revit convert`: a checkpoint of the released code as one of ours."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from revit.cli.parser import Parser, UsageError
from revit.cli.runs import checkpoint_config
from revit.cli.scanning import open_with_progress
from revit.conversion import ConversionError, Converted, convert_released
from revit.conversion.state_files import read_state_dict
from revit.data import DataOptions, DataSpec
from revit.data.cifar10 import cifar10_spec
from revit.data.digits import digit_spec
from revit.data.image_files import printable
from revit.data.imagenet import CENTRE, MEAN, SIZE, STD
from revit.data.pcam import pcam_spec
from revit.training.checkpoint import write_checkpoint
from revit.training.recipe import ModelOptions, Recipe

USAGE = "FILE --out FOLDER (--data NAME | --size N) [--num-heads N] [--window-size N] [--num-classes N]"
ABOUT = """Reads a state dict that the released code saved, of its flat or its windowed model, with any group, in train or in
eval mode, and writes it as a checkpoint folder for eval, predict, audit and export. escnn is not needed. Nothing in FILE is
executed: it may hold tensors and numbers only."""
DATASETS = ("rotmnist", "cifar10", "pcam", "imagenet")


def run(words: list[str]) -> int:
    parser = Parser("convert", USAGE, ABOUT)
    parser.add_argument("file", metavar="FILE", type=str, help="checkpoint or state dict, as torch.save wrote it")
    parser.add_argument("--out", metavar="FOLDER", type=str, required=True, help="folder to write, which must not be there yet")
    parser.add_argument("--data", choices=list(DATASETS), help="what it was trained on: image size, normalisation and classes")
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with that data, to take the class names from")
    parser.add_argument("--size", metavar="N", type=int, help="side of its images, if it was trained on something else")
    parser.add_argument(
        "--num-heads", metavar="N|[N,...]", type=int | list[int], help="attention heads (of each stage), which no file tells"
    )
    parser.add_argument("--window-size", metavar="N", type=int, default=7, help="side of the windows of a windowed model")
    parser.add_argument("--num-classes", metavar="N", type=int, help="keep the first N outputs of the classifier only")
    options = parser.parse_args(words)
    out = Path(options.out)
    if out.exists():
        raise UsageError(f"{printable(out)}: is already there; choose another --out")
    if options.data is None and (options.size is None or options.data_root is not None):
        raise UsageError(f"say what it was trained on, --data {', '.join(DATASETS)}, or the side of its images, --size N")
    if min(options.window_size, options.size or 1) < 1:
        raise UsageError(f"--window-size and --size are at least 1, got {options.window_size} and {options.size}")
    console = Console()
    tensors, epoch = read_state_dict(Path(options.file))
    try:
        converted = convert_released(
            tensors, num_heads=options.num_heads, window_size=options.window_size, num_classes=options.num_classes
        )
    except ValueError as error:  # of the state dict, or of a model that cannot be built with these options
        raise ConversionError(f"{printable(options.file)}: {error}") from error
    data = DataOptions(name=options.data or "folder", root=options.data_root, size=options.size)
    spec = _spec(converted, data, options, console)
    notes = _notes(converted, spec)
    recipe = Recipe(model=ModelOptions(name=converted.name, **converted.arguments), data=data)
    config = checkpoint_config(recipe, spec)
    write_checkpoint(out, model=converted.model.state_dict(), config=config, trainer={}, state={"epoch": epoch})
    _report(console, out, converted, spec, notes)
    return 0


def _spec(converted: Converted, data: DataOptions, options: Namespace, console: Console) -> DataSpec:
    """The images that the model takes, normalised as the released code does."""
    source, numbered = "not looked at: the model was converted", tuple(map(str, range(converted.num_classes)))
    if options.data_root is not None:
        spec = open_with_progress(data, console).spec
    elif options.data is None:
        channels = converted.in_chans
        spec = DataSpec("folder", channels, (options.size,) * 2, numbered, (0.0,) * channels, (1.0,) * channels, source)
    elif options.data == "rotmnist":
        spec = digit_spec("rotmnist", source)
    elif options.data == "imagenet":
        spec = DataSpec("imagenet", 3, (SIZE, SIZE), numbered, MEAN, STD, source, centre=CENTRE)
    else:
        spec = {"cifar10": cifar10_spec, "pcam": pcam_spec}[options.data](source)
    if spec.channels != converted.in_chans:
        raise UsageError(f"the model takes {converted.in_chans} channels, images of {spec.name} have {spec.channels}")
    if spec.num_classes != converted.num_classes:
        raise UsageError(
            f"the model has {converted.num_classes} outputs, {spec.name} has {spec.num_classes} classes;"
            f" --num-classes {spec.num_classes} keeps the first ones"
        )
    return spec if options.size is None else replace(spec, size=(options.size, options.size))


def _notes(converted: Converted, spec: DataSpec) -> list[str]:
    """What is not as one might expect at this size."""
    model, window = converted.model, converted.arguments.get("window_size")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = model.check_input_size(*spec.size)  # type: ignore[operator]
    notes = [f"inexact, as the released model is: {caught[0].message}"] if caught else []
    if window is not None and any(side % window for name, size in sizes.items() if name.endswith("attn") for side in size):
        notes.append(
            f"windows of {window} do not divide its maps: the released code pads them and attends to the padding, ours masks"
            " it, so the logits differ"
        )
    return notes


def _report(console: Console, out: Path, converted: Converted, spec: DataSpec, notes: list[str]) -> None:
    arguments = converted.arguments
    count = sum(parameter.numel() for parameter in converted.model.parameters())
    lines = [
        f"{printable(out)}: {converted.name}, {arguments['group']}, fields {arguments['dims']}, blocks {arguments['depths']},"
        f" heads {arguments['num_heads']}, {count:,} parameters",
        f"  images of {spec.channels} x {spec.size[0]} x {spec.size[1]} ({spec.name}), {spec.num_classes} classes",
        f"  its filters are those of the file to {converted.leftover:.0e}",
        *(f"  note: {note}" for note in notes),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
