"""`revit audit`: does a model keep its promise? For runs, registered models, any module and exported files."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from revit.cli.parser import Parser, UsageError
from revit.cli.report import choose_images, write_json
from revit.cli.runs import default_folder, run_data
from revit.cli.scanning import open_with_progress
from revit.cli.subjects import Subject, is_trained, open_subject
from revit.data import DataOptions, DataSpec, Images
from revit.data.file_images import Fit
from revit.data.unlabelled import open_images
from revit.evaluation import Audit, ByAngle, RandomTurns, audit_model, errors_by_angle, normalised_black, random_transformations
from revit.evaluation.audit import BATCH, SAMPLES
from revit.evaluation.audit_figures import (
    draw_attention,
    draw_errors_by_angle,
    draw_stage_errors,
    draw_turning_features,
    write_turning_gif,
)
from revit.evaluation.audit_page import Picture, verdict_of, write_page
from revit.evaluation.generalisation import VERSIONS
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.stages import check_logits
from revit.groups import Group
from revit.training.recipe import ModelOptions
from revit.training.run_folder import environment

USAGE = "RUN|MODEL [--group GROUP] [--images FILES] [--data-root DIR] [--out DIR] [--fail-above ERROR]"
ABOUT = """How far the features and answers of a model are from turning with the image, at every stage and for every element of
a group; what random turns and every angle do to its predictions; pictures of it. The model is a folder of a run or of weights,
a model whose weights come with the package, the name of a registered model (random weights), package.module:factory for any
torch.nn.Module, or a TorchScript or ONNX file. Writes audit.json, report.html (one page) and its pictures to --out."""
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_CLASSES = 1000
SHOWN_STAGES = 16
PICTURES = ("stage_errors.png", "errors_by_angle.png", "turning_features.png", "turning_features.gif", "attention.png")


@dataclass(frozen=True)
class Material:
    """The images of an audit, normalised [N, C, H, W], and what they are."""

    x: Tensor
    spec: DataSpec
    classes: tuple[str, ...] | None  # names of the classes, if the model was trained for them


def run(words: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(words)
    for name in ("samples", "batch_size", "versions", "angle_images", "angle_step"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.fail_above is not None and not options.fail_above >= 0:
        raise UsageError(f"--fail-above is an error of 0 or more, got {options.fail_above}")
    if options.group is not None:
        Group.parse(options.group)
    console = Console()
    subject, material = _open(options, console)
    group = Group.parse(options.group or subject.group or "p4m")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = replace(subject, model=subject.model.to(device).eval())
    _try(subject, material)
    folder = Path(options.out) if options.out else _default_folder(subject)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{subject.label} under {group}: {len(material.x):,} images of {material.spec.name} ({material.spec.source})",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    audit, failed = _measure_and_report(subject, group, material, options, folder, console)
    if failed is not None:
        console.print(
            f"[bold red]failed[/bold red]: {failed} has a largest error of {audit.worst(failed):.1e},"
            f" above {options.fail_above:g}", highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 1
    return 0


def _try(subject: Subject, material: Material) -> None:
    """One image, before anything is written: a model of others may take images of another kind."""
    device, dtype = place_of(subject.model)
    try:
        with evaluating(subject.model):
            check_logits(subject.model(material.x[:1].to(device, dtype)), 1)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        channels, (height, width) = material.spec.channels, material.spec.size
        why = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{subject.label}: fails on an image of {channels} channels and {height} x {width} pixels ({why});"
            " name others with --data.name, or with --images, --size and --channels"
        ) from error


def _parser() -> Parser:
    parser = Parser("audit", USAGE, ABOUT)
    parser.add_argument("subject", metavar="RUN|MODEL", type=str, help="run, weights, model, package.module:factory or file")
    parser.add_argument(
        "--group", metavar="GROUP", type=str, help="whose elements are tried (default: the model's own, or p4m)"
    )
    parser.add_argument("--images", metavar="FILES", type=str, help="image files, a folder or a pattern instead of a dataset")
    parser.add_argument(
        "--size", metavar="N", type=int, help="side that --images are resized to (default: the model's, or 224)"
    )
    parser.add_argument("--channels", metavar="N", type=int, help="channels of --images (default: the model's, or 3)")
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data, if it is not where it was")
    parser.add_argument("--split", default="test", choices=["test", "val", "train"], help="images that are taken first")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights of a run")
    parser.add_argument("--samples", metavar="N", type=int, default=SAMPLES, help="images, the paper's number")
    parser.add_argument("--batch-size", metavar="N", type=int, default=BATCH, help="images at a time, the paper's number")
    parser.add_argument("--versions", metavar="N", type=int, default=VERSIONS, help="random turns of each image")
    parser.add_argument("--angle-images", metavar="N", type=int, default=32, help="images that are turned by every angle")
    parser.add_argument("--angle-step", metavar="N", type=int, default=1, help="degrees between angles")
    parser.add_argument(
        "--every-layer", action="store_true", help="the layers of a foreign module must turn too, not only its answers"
    )
    parser.add_argument("--out", metavar="DIR", type=str, help="folder for the results (default: RUN/audit, or audit/MODEL)")
    parser.add_argument(
        "--fail-above", metavar="ERROR", type=float,
        help="exit with 1 if a stage has a larger error under an exact turn or mirror; 1e-4 suits float32",
    )  # fmt: skip
    parser.add_argument("--model.group", dest="model_group", metavar="GROUP", type=str, help="group of a registered model")
    parser.add_section("model", skip=frozenset({"name", "group"}))
    parser.add_section("data", skip=frozenset({"root"}))
    return parser


def _measure_and_report(
    subject: Subject, group: Group, material: Material, options: Namespace, folder: Path, console: Console
) -> tuple[Audit, str | None]:
    """All measurements, files and lines of an audit; the stage that is above --fail-above, if that was asked for."""
    x, fill = material.x, normalised_black(material.spec)
    size: dict[str, Any] = {"fill": fill, "batch_size": options.batch_size}
    audit = audit_model(subject.model, x, group, every_layer=options.every_layer, **size)
    print_stages(console, audit)
    random = random_transformations(subject.model, x, versions=options.versions, **size)
    print_random(console, random)
    degrees = range(0, 360, options.angle_step)
    by_angle = errors_by_angle(subject.model, x[: options.angle_images], degrees=degrees, **size)
    facts = {
        "subject": subject.label,
        "data": material.spec.source,
        "size": list(material.spec.size),
        "batch_size": options.batch_size,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        **environment(),
    }
    write_json(
        folder / "audit.json",
        {**facts, "audit": audit.to_dict(), "random_transformations": random.to_dict(), "by_angle": by_angle.to_dict()},
    )
    limit = audit.tolerance if options.fail_above is None else options.fail_above
    broken = audit.broken_stage(limit)
    verdict = verdict_of(audit, limit)
    pictures = _draw(subject.model, group, material, audit, by_angle, limit, folder)
    write_page(
        folder / "report.html", title=f"Equivariance of {subject.label}", facts=facts, audit=audit, random=random,
        by_angle=by_angle, pictures=pictures, verdict=verdict, tolerance=limit,
    )  # fmt: skip
    console.print(verdict, highlight=False, markup=False, soft_wrap=True)
    console.print(f"report.html, audit.json and pictures are in {folder}", highlight=False, markup=False, soft_wrap=True)
    return audit, broken if options.fail_above is not None else None


def print_stages(console: Console, audit: Audit) -> None:
    """A line a stage: absolute errors as in the paper, relative ones, those in the disc, the largest of exact elements."""
    table = Table(box=None)
    for column in ("stage", "turns as", "absolute", "relative", "disc", "largest"):
        table.add_column(column, justify="left" if column in ("stage", "turns as") else "right", no_wrap=column != "stage")
    names, broken = list(audit.stages), audit.broken_stage()
    hidden = set(names[SHOWN_STAGES // 2 : -SHOWN_STAGES // 2]) - {broken} if len(names) > SHOWN_STAGES else set()
    for name in names:
        if name in hidden:
            continue
        stage = audit.stages[name]
        mean, deviation = stage.over_elements()
        relative, disc = stage.over_elements("relative")[0], stage.over_elements("disc_relative")[0]
        table.add_row(
            f"{name} <- breaks" if name == broken else name, stage.kind, f"{_number(mean)} ± {_number(deviation)}",
            _number(relative), _number(disc), _number(audit.worst(name)),
        )  # fmt: skip
    console.print(table)
    if hidden:
        console.print(f"  ({len(hidden)} stages not shown; audit.json has all)", highlight=False)
    if audit.mean_consistency_percent is not None:
        deviation = audit.to_dict()["consistency_percent_std"]
        moves = "turns and mirrors" if audit.group.endswith("m") else "turns"
        console.print(
            f"  {audit.mean_consistency_percent:.2f} ± {deviation:.2f} % of predictions are the same under the"
            f" {len(audit.elements) - 1} {moves} of {audit.group}", highlight=False, soft_wrap=True,
        )  # fmt: skip


def print_random(console: Console, random: RandomTurns) -> None:
    for name, found in (("full frame", random.frame), ("central disc", random.disc)):
        console.print(
            f"  random turns and mirrors, {name}: {found.consistency_percent:.2f} % the same, probabilities differ by"
            f" {found.probability_difference:.6f} (top class {found.top_class_difference:.6f})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _draw(
    model: nn.Module, group: Group, material: Material, audit: Audit, by_angle: ByAngle, limit: float, folder: Path
) -> list[Picture]:
    """Every picture that this model allows."""
    one, fill = material.x[:1], normalised_black(material.spec)
    stages, angles, still, moving, attention = (folder / name for name in PICTURES)
    draw_stage_errors(audit, stages, tolerance=limit)
    draw_errors_by_angle(by_angle, angles)
    pictures = [
        Picture(
            stages,
            "Relative difference between the features of a turned image and the turned features, after each stage.",
            "Dots for each stage of the model and each turn, on a logarithmic scale, with the tolerance as a line.",
        ),
        Picture(
            angles,
            f"What a turn by each angle does to the answers, mean over {by_angle.samples} images.",
            "A polar curve of the error by angle, in the full frame and with the central disc alone.",
        ),
    ]
    if draw_turning_features(model, one, group, still, fill=fill):
        text = (
            "Features of one image and of its turned versions: each row is the first one turned, and its columns trade places."
        )
        pictures.append(Picture(still, text, "Feature maps in a grid, one row for each turn."))
    write_turning_gif(model, one, moving, fill=fill, group=group, classes=material.classes)
    text = "The image turns, its features turn with it, and the answer below stays or does not."
    pictures.append(Picture(moving, text, "An animation of a turning image and its feature maps."))
    if draw_attention(model, one, group, attention, fill=fill):
        text = "Where three pixels look, in the image and in the turned image, and what remains when the latter is turned back."
        pictures.append(Picture(attention, text, "Attention maps side by side."))
    return pictures


def _open(options: Namespace, console: Console) -> tuple[Subject, Material]:
    chosen: dict[str, Any] = {**vars(options.model), "group": options.model_group}  # none: the model's own
    model_options = ModelOptions(name=options.subject, **chosen)
    if options.images is not None:
        subject = _opened(options, model_options, options.channels or 3, IMAGENET_CLASSES)
        spec = _spec_of_files(options, subject)
        images: list[Images] = [open_images([options.images], Fit(spec.channels, spec.size, floating=True))]
    else:
        data = DataOptions(**vars(options.data), root=options.data_root)
        trained = _opened(options, model_options, 1, 2) if is_trained(options.subject) else None
        if trained is not None and trained.run is not None:
            data = run_data(trained.run, options.data_root, None)
        dataset = open_with_progress(data, console)
        spec = dataset.spec
        subject = trained or _opened(options, model_options, spec.channels, spec.num_classes)
        if subject.spec is not None:
            if (subject.spec.channels, subject.spec.size) != (spec.channels, spec.size):
                raise UsageError(
                    f"the run takes images of {subject.spec.channels} channels and {subject.spec.size[0]} x"
                    f" {subject.spec.size[1]} pixels; these have {spec.channels} and {spec.size[0]} x {spec.size[1]}"
                )
            spec = replace(subject.spec, source=spec.source)
        order = [options.split, *(part for part in ("test", "val", "train") if part != options.split)]
        images = [dataset.split(part) for part in order]
    x = choose_images(images, spec, options.samples)
    classes = subject.spec.classes if subject.spec is not None else None
    return subject, Material(x, spec, classes)


def _opened(options: Namespace, model: ModelOptions, channels: int, classes: int) -> Subject:
    return open_subject(options.subject, model, in_chans=channels, num_classes=classes, checkpoint=options.checkpoint)


def _spec_of_files(options: Namespace, subject: Subject) -> DataSpec:
    """What is assumed of image files without a dataset: ImageNet's size and normalisation, if nothing else is said."""
    source = f"image files {Path(options.images).name}"
    if subject.spec is not None:
        return replace(subject.spec, name="files", source=source)
    shape = getattr(subject.model, "input_shape", None) or (None, None, None)  # an ONNX file may say what it takes
    channels = options.channels or shape[0] or 3
    height, width = (options.size or side or 224 for side in shape[1:])
    mean, std = IMAGENET if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
    classes = tuple(map(str, range(IMAGENET_CLASSES)))
    return DataSpec("files", channels, (height, width), classes, mean, std, source)


def _default_folder(subject: Subject) -> Path:
    if subject.run is not None:
        return default_folder(subject.run, "audit")
    return Path("audit") / "-".join(re.findall(r"[\w.]+", subject.label))
