"""`revit benchmark plan`: does a recipe fit on GPUs that are not here, and how long would it take?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from torch import nn

from revit.cli.parser import Parser, UsageError
from revit.cli.report import write_json
from revit.cli.units import parse_bytes, show_bytes
from revit.evaluation.complexity import count_macs
from revit.evaluation.memory import give_back_freed_memory, in_fresh_process, step_memory
from revit.evaluation.planning import StepCost, step_cost
from revit.models import create_model
from revit.models.budget import count_parameters
from revit.training.recipe import ModelOptions, Recipe
from revit.training.run_folder import environment
from revit.training.sharding import sharded_parts

USAGE = "[RECIPE] [--gpus 4] [--gpu-memory 24GB] [--gpu-tflops 60] [--section.option value ...]"
ABOUT = """Memory and time of a recipe (imagenet_p4m if none is named; every option can be changed) on GPUs that need
not be here. Memory is measured, not guessed: two training steps of a few images run on this machine, with zeros for the
products of matrices, and every tensor is followed; what the steps take is a function of the batch. Multiply-adds are counted in
the same steps. Time is operations over rate, where --utilisation is the share of the peak rate that a GPU is assumed to reach.
--check N compares the memory with that of a real step of N images on this machine, in float32."""
RESERVED = 0.08
"""Share of a GPU's memory that its libraries and the holes between tensors take. An assumption."""

BYTES, ADAM = 4, 2  # of a weight, also in mixed precision; numbers that AdamW keeps of each


@dataclass(frozen=True)
class Hardware:
    """The GPUs, and what is assumed of them."""

    gpus: int
    memory: int  # bytes of one
    tflops: float
    utilisation: float
    link: int  # bytes a second between two of them


@dataclass(frozen=True)
class Plan:
    """One way to run a recipe: bytes of each part on one GPU, and what comes of it."""

    checkpointing: bool
    gpus: int
    images: int  # of one GPU at a time
    memory: dict[str, float]
    total: float
    fits: bool
    largest_batch: int  # images of one GPU at a time that would fit
    step_macs: float  # of one image, forward and backward
    images_per_second: float  # on all GPUs
    exchange_share: float  # of the time, if nothing overlaps
    days: float


def run(words: list[str]) -> int:
    parser = Parser("benchmark plan", USAGE, ABOUT)
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="imagenet_p4m", type=str, help="recipe or YAML file")
    parser.add_argument("--gpus", metavar="N", type=int, default=4, help="number of GPUs, one process each")
    parser.add_argument("--gpu-memory", metavar="SIZE", type=str, default="24GB", help="memory of one")
    parser.add_argument("--gpu-tflops", metavar="RATE", type=float, default=60.0, help="peak rate of one in this precision")
    parser.add_argument("--utilisation", metavar="SHARE", type=float, default=0.3, help="share of that rate which is reached")
    parser.add_argument("--link", metavar="SIZE", type=str, default="10GB", help="bytes a second from one GPU to another")
    parser.add_argument("--size", metavar="N", type=int, help="side of the images (default: data.size, or 224)")
    parser.add_argument("--channels", metavar="N", type=int, default=3, help="channels of the images")
    parser.add_argument("--classes", metavar="N", type=int, default=1000, help="number of classes")
    parser.add_argument("--images", metavar="N", type=int, default=1_281_167, help="training images")
    parser.add_argument("--check", metavar="N", type=int, default=0, help="compare with a real step of N images here")
    parser.add_argument("--out", metavar="FILE.json", type=str, help="also write the figures")
    parser.add_recipe_options()
    options, recipe = parser.read_recipe_options(parser.recipe_of(words), words)
    size, hardware = _checked(options, recipe)
    shape = (options.channels, size, options.classes)
    model = build(recipe.model, *shape)
    can_checkpoint = hasattr(model, "set_grad_checkpointing")
    if recipe.train.grad_checkpointing and not can_checkpoint:
        raise UsageError(f"{recipe.model.name} has no gradient checkpointing; leave out --train.grad_checkpointing")
    console, costs = Console(width=120), dict[bool, StepCost]()
    with console.status("two steps of a few images"):
        for checkpointing in (False, True) if can_checkpoint else (False,):
            _set_checkpointing(model, checkpointing)
            costs[checkpointing] = step_cost(model, (size, size), options.channels, bf16=recipe.train.precision == "bf16")

    def in_parts(accumulate: int) -> list[Plan]:
        changed = replace(recipe, train=replace(recipe.train, accumulate=accumulate))
        return [_plan(model, changed, hardware, checkpointing, cost, options.images) for checkpointing, cost in costs.items()]

    plans, forward = in_parts(recipe.train.accumulate), count_macs(model, size).total
    _print(console, model, recipe, hardware, size, forward, plans)
    console.print(_verdict(recipe, plans, in_parts), highlight=False, soft_wrap=True)
    checks = [_check(recipe.model, shape, options.check, checkpointing) for checkpointing in costs] if options.check else []
    _print_checks(console, checks, options.check)
    if options.out:
        figures = {"plans": [asdict(plan) for plan in plans], "checks": checks, "hardware": asdict(hardware)}
        write_json(Path(options.out), {**figures, "recipe": recipe.to_dict(), "forward_macs": forward, **environment()})
    return 0


def build(options: ModelOptions, channels: int, size: int, classes: int) -> nn.Module:
    """The model of a recipe for images of this shape, the same every time, with the algorithm that GPUs take."""
    torch.manual_seed(0)
    model = create_model(options.name, in_chans=channels, num_classes=classes, **options.arguments())
    check = getattr(model, "check_input_size", None)
    if check is not None:
        check(size, size)
    for module in model.modules():
        algorithm = getattr(module, "algorithm", None)
        if algorithm is not None and hasattr(algorithm, "renamed"):
            setattr(module, "algorithm", algorithm.renamed("dense"))  # noqa: B010 (a module says nothing of its attributes)
    return model


def _set_checkpointing(model: Any, enable: bool) -> None:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(enable)


def _checked(options: Namespace, recipe: Recipe) -> tuple[int, Hardware]:
    for name in ("gpus", "channels", "images"):
        if options[name] < 1:
            raise UsageError(f"--{name} must be at least 1, got {options[name]}")
    if options.classes < 2:
        raise UsageError(f"--classes must be at least 2, got {options.classes}")
    if not (math.isfinite(options.gpu_tflops) and options.gpu_tflops > 0):
        raise UsageError(f"--gpu-tflops must be above 0, got {options.gpu_tflops}")
    if not 0 < options.utilisation <= 1:
        raise UsageError(f"--utilisation must be above 0 and at most 1, got {options.utilisation}")
    if options.check < 0 or options.check == 1:
        raise UsageError(f"--check needs at least 2 images, got {options.check}")
    if recipe.train.precision == "float64":
        raise UsageError("train.precision float64 is for checks, not for GPUs; plan with float32 or bf16")
    size = options.size if options.size is not None else recipe.data.size or 224
    if size < 1:
        raise UsageError(f"--size must be at least 1, got {size}")
    if recipe.train.batch_size < options.gpus * recipe.train.accumulate:
        raise UsageError(
            f"a batch of {recipe.train.batch_size} cannot be shared by {options.gpus} GPUs in {recipe.train.accumulate} parts"
            " each; raise --train.batch_size"
        )
    memory, link = parse_bytes(options.gpu_memory, "--gpu-memory"), parse_bytes(options.link, "--link")
    return size, Hardware(options.gpus, memory, options.gpu_tflops, options.utilisation, link)


def _plan(model: nn.Module, recipe: Recipe, hardware: Hardware, checkpointing: bool, cost: StepCost, images: int) -> Plan:
    train, gpus = recipe.train, hardware.gpus
    weights = BYTES * count_parameters(model)
    share = gpus if train.sharding == "fsdp" else 1
    largest = max(BYTES * sum(p.numel() for p in part.parameters()) for part in (*sharded_parts(model), nn.Linear(1, 1)))
    at_a_time = math.ceil(train.batch_size / (gpus * train.accumulate))
    memory = {
        "weights": weights / share,
        "optimiser": ADAM * weights / share,
        "average of weights": weights * bool(train.ema),
        "copy for evaluation": weights * (train.sharding == "fsdp"),
        # DDP sums gradients in buffers of their own; FSDP has two parts gathered and the gradient of a third.
        "exchange": 0 if gpus == 1 else 3 * largest if share > 1 else weights,
        "gradients of earlier parts": weights / share * (train.accumulate > 1),
    }
    standing = sum(memory.values())
    memory["activations"] = cost.kept(at_a_time)
    memory["gradients and work"] = cost.peak(at_a_time) - cost.kept(at_a_time)
    usable = hardware.memory * (1 - RESERVED)
    total = standing + cost.peak(at_a_time)
    per_step = train.batch_size / gpus * cost.macs[1] + train.accumulate * cost.macs[0]
    computing = 2 * per_step / (hardware.tflops * 1e12 * hardware.utilisation)
    # A ring passes (N - 1) / N of the gradients twice (DDP); FSDP gathers the weights in both passes and sums the gradients.
    exchanging = (3 if share > 1 else 2) * weights * (gpus - 1) / gpus / hardware.link
    seconds = computing + exchanging
    return Plan(
        checkpointing=checkpointing, gpus=gpus, images=at_a_time, memory=memory, total=total, fits=total <= usable,
        largest_batch=cost.largest_batch(usable - standing), step_macs=cost.macs[1],
        images_per_second=train.batch_size / seconds, exchange_share=exchanging / seconds,
        days=train.epochs * math.ceil(images / train.batch_size) * seconds / 86_400,
    )  # fmt: skip


def _print(
    console: Console, model: nn.Module, recipe: Recipe, hardware: Hardware, size: int, forward: int, plans: list[Plan]
) -> None:
    train = recipe.train

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(
        f"{recipe.model.name} {recipe.model.group}: {count_parameters(model):,} parameters, {forward / 1e9:.3g} G multiply-adds"
        f" for an image of {size} x {size}"
    )
    say(
        f"{hardware.gpus} GPUs of {show_bytes(hardware.memory)}, {train.sharding}, {train.precision}, {train.batch_size} images"
        f" a step, {plans[0].images} at a time on each"
    )
    table = Table(box=None)
    table.add_column("on each GPU")
    for plan in plans:
        table.add_column("with checkpointing" if plan.checkpointing else "as it is", justify="right")
    for part, _ in (entry for entry in plans[0].memory.items() if any(plan.memory[entry[0]] for plan in plans)):
        table.add_row(part, *(show_bytes(plan.memory[part]) for plan in plans))
    rows: list[tuple[str, Any]] = [
        ("in all", lambda plan: show_bytes(plan.total)),
        ("fits", lambda plan: "yes" if plan.fits else "no"),
        ("largest number of images", lambda plan: f"{plan.largest_batch:,}"),
        ("multiply-adds to train on one", lambda plan: f"{plan.step_macs / 1e9:.3g} G"),
        ("images/s on all GPUs", lambda plan: f"{plan.images_per_second:,.0f}"),
        ("of the time, exchange", lambda plan: f"{plan.exchange_share:.1%}"),
        (f"days for {train.epochs} epochs", lambda plan: f"{plan.days:.3g}"),
    ]
    for name, show in rows:
        table.add_row(name, *(show(plan) for plan in plans))
    console.print(table)
    say(
        f"assumed: {hardware.utilisation:.0%} of {hardware.tflops:g} TFLOP/s, {show_bytes(hardware.link)}/s between GPUs,"
        f" {RESERVED:.0%} of the memory for libraries and holes"
    )


def _verdict(recipe: Recipe, plans: list[Plan], in_parts: Callable[[int], list[Plan]]) -> str:
    """What to run: as it is, else with checkpointing, else in as few parts as fit."""
    most = recipe.train.batch_size // plans[0].gpus
    for parts in range(recipe.train.accumulate, most + 1):
        found = plans if parts == recipe.train.accumulate else in_parts(parts)
        chosen = next((plan for plan in found if plan.fits and plan.checkpointing >= recipe.train.grad_checkpointing), None)
        if chosen is None:
            continue
        changes = [f"--train.accumulate {parts}"] * (parts != recipe.train.accumulate)
        changes += ["--train.grad_checkpointing true"] * (chosen.checkpointing > recipe.train.grad_checkpointing)
        return f"it fits with {' '.join(changes)}" if changes else "it fits as it is"
    return "it does not fit, in however many parts; take GPUs with more memory, or a smaller model"


def _check(options: ModelOptions, shape: tuple[int, int, int], batch: int, checkpointing: bool) -> dict[str, Any]:
    """Predicted and real peak of a step, both in float32 and beyond weights and optimiser."""
    real = in_fresh_process(_real_step, options, shape, batch, checkpointing)
    model = build(options, *shape)
    _set_checkpointing(model, checkpointing)
    predicted = step_cost(model, (shape[1], shape[1]), shape[0]).peak(batch)
    return {"checkpointing": checkpointing, "batch": batch, "predicted_bytes": predicted, "measured_bytes": real}


def _real_step(options: ModelOptions, shape: tuple[int, int, int], batch: int, checkpointing: bool) -> int:
    give_back_freed_memory()
    model = build(options, *shape)
    _set_checkpointing(model, checkpointing)
    return step_memory(model, torch.randn(batch, shape[0], shape[1], shape[1]))


def _print_checks(console: Console, checks: list[dict[str, Any]], batch: int) -> None:
    for check in checks:
        predicted, measured = check["predicted_bytes"], check["measured_bytes"]
        console.print(
            f"a step of {batch} images here, float32, {'with checkpointing' if check['checkpointing'] else 'as it is'}:"
            f" predicted {show_bytes(predicted)}, measured {show_bytes(measured)} ({predicted / measured - 1:+.1%})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
