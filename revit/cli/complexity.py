"""`revit benchmark complexity`: what models cost on each group, next to what the paper says."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from revit.cli.parser import Parser, UsageError
from revit.cli.report import write_json
from revit.evaluation.complexity import count_macs, measured_macs, parameter_macs
from revit.evaluation.complexity_figures import draw_cost
from revit.evaluation.memory import forward_memory, forward_task, in_fresh_process, step_memory, step_task
from revit.groups import Group
from revit.models import create_model, list_models
from revit.models.budget import count_parameters, match_parameters
from revit.reproduce.paper import PaperRow, paper_tables
from revit.training.run_folder import environment

USAGE = "[--groups [z2,p4,p8]] [--models [revit]] [--size 28] [--batch-size 16] [--out FILE.json] [--plot FILE.png]"
ABOUT = """Multiply-adds (by formula, and as torch counts them), peak memory and time on each group, at about the same number of
parameters, for grey images and ten classes. `revit` is the paper's model without dropout: its three attentions with both
projections; any other model is named as in `revit models`. Memory is measured in a process of its own for each figure, and
time in rounds in which every model runs once, on two threads at most. "by parameters" is what tools such as torchinfo make of
a model, weights times positions, which leaves out attention and most of a steerable filter; the paper's figures, which grow
with the group as these do, stand beside the configuration of the released code (spatial, full)."""
ATTENTIONS, PROJECTIONS = ("spatial", "per_element", "joint"), ("full", "separable")
THREADS, WIDTH, PAPER_SIZE = 2, 120, 28
REVIT: dict[str, Any] = {"stride": 1, "num_heads": 1, "drop_rate": 0.0, "attn_drop_rate": 0.0, "init": "normal"}


@dataclass(frozen=True)
class Configuration:
    """One row: a model of the registry and the arguments that make it what it is."""

    model: str  # as the user calls it
    group: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return (
            f"{self.model} {self.group} {' '.join(self.arguments.get(key, '') for key in ('attention', 'projection'))}".strip()
        )

    def build(self, dims: int | list[int] | None = None) -> nn.Module:
        arguments = {"group": self.group, "in_chans": 1, "num_classes": 10, **self.arguments}
        if self.model == "revit":
            arguments = {**REVIT, **arguments}
        if dims is not None:
            arguments["dims"] = dims
        torch.manual_seed(0)
        return create_model("revit_tiny_paper" if self.model == "revit" else self.model, **arguments)

    def matched(self, parameters: int) -> Configuration:
        """The same at the largest width with at most so many parameters; as it is, if the model has no width to choose."""
        model: Any = self.build()
        if not hasattr(model, "dims"):
            return self
        dims, heads = (value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in _shape(model))
        found, _ = match_parameters(self.build, dims, heads, parameters)
        return Configuration(self.model, self.group, {**self.arguments, "dims": found})


def _shape(model: Any) -> tuple[Any, Any]:
    return model.dims, getattr(model, "num_heads", 1)


def run(words: list[str]) -> int:
    parser = Parser("benchmark complexity", USAGE, ABOUT)
    groups = ["z2", "p4", "p8", "p4m", "p12", "p16"]
    parser.add_argument("--groups", type=list[str], default=groups, metavar="[z2,p4,p8]", help="groups to compare")
    parser.add_argument("--models", type=list[str], default=["revit"], metavar="[revit,...]", help="revit, or names of models")
    parser.add_argument("--size", metavar="N", type=int, default=28, help="side of the images")
    parser.add_argument("--batch-size", metavar="N", type=int, default=16, help="images of a pass, at least 2")
    parser.add_argument("--parameters", metavar="N", type=int, default=44300, help="each model is as wide as this allows")
    parser.add_argument(
        "--limit", metavar="G", type=float, default=4.0, help="leave out what takes more 10^9 mul-adds an image"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="how often everything is timed")
    parser.add_argument("--out", metavar="FILE.json", type=str, help="also write the figures")
    parser.add_argument("--plot", metavar="FILE.png", type=str, help="also draw them against the order of the group")
    options = parser.parse_args(words)
    if options.batch_size < 2 or min(options.size, options.parameters, options.rounds) < 1:
        raise UsageError("size, parameters and rounds must be at least 1, the batch size at least 2")
    if not options.groups or not options.models:
        raise UsageError("--groups and --models must name at least one each")
    console = _console()
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    try:
        rows = _measure(_configurations(options.models, options.groups), options, console)
        facts = {"size": options.size, "batch_size": options.batch_size, "rounds": options.rounds, **environment()}
    finally:
        torch.set_num_threads(threads)
    console.print(_table(rows))
    if options.out:
        write_json(Path(options.out), {"rows": rows, **facts})
    if options.plot:
        draw_cost(rows, Path(options.plot))
    return 0


def print_report(path: Path) -> None:
    """The table of figures that were written before."""
    _console().print(_table(json.loads(path.read_text(encoding="utf-8"))["rows"]))


def _console() -> Console:
    console = Console()
    return console if console.width >= WIDTH else Console(width=WIDTH)


def _configurations(models: list[str], groups: list[str]) -> list[Configuration]:
    names = [Group.parse(group).name for group in groups]
    for model in models:
        if model != "revit" and model not in list_models():
            create_model(model)  # raises with the nearest names
    found = []
    for model, group in product(models, names):
        kinds = product(ATTENTIONS, PROJECTIONS) if model == "revit" else [None]
        for kind in kinds:
            found.append(Configuration(model, group, dict(zip(("attention", "projection"), kind, strict=True)) if kind else {}))
    return found


def _measure(configurations: list[Configuration], options: Any, console: Console) -> list[dict[str, Any]]:
    """The rows, and a line for each configuration that cannot be had (a plain transformer has no group but z2)."""
    x = torch.randn(options.batch_size, 1, options.size, options.size, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    models: list[nn.Module] = []
    refused: list[str] = []
    for wanted in configurations:
        try:
            configuration = wanted.matched(options.parameters)
            model = configuration.build()
            row = _counts(configuration, model, x[:2])  # the counts are those of one image
            _check_affordable(row, options.limit)
        except ValueError as error:
            refused.append(f"{wanted.name}: {error}")
            continue
        for task in ("forward", "step"):
            row[f"{task}_bytes"] = in_fresh_process(_peak, configuration, task, options.batch_size, options.size)
        rows.append(row)
        models.append(model)
        console.print(f"measured memory of {configuration.name}", highlight=False, style="dim")
    if not rows:
        raise UsageError(refused[0])
    for line in refused:
        console.print(f"left out: {line}", highlight=False, soft_wrap=True)
    for task, maker in (("forward", forward_task), ("step", _new_step)):
        console.print(f"timing {task} of {len(models)} models in {options.rounds} rounds", highlight=False, style="dim")
        seconds = _interleaved([maker(model, x) for model in models], options.rounds)
        for row, taken in zip(rows, seconds, strict=True):
            row[f"{task}_seconds"] = taken / len(x)
    return rows


def _new_step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    return step_task(model, torch.optim.AdamW(model.parameters(), lr=0.0), x)


def _counts(configuration: Configuration, model: nn.Module, x: Tensor) -> dict[str, Any]:
    formula, counted = count_macs(model, x.shape[-1]), measured_macs(model, x)
    row = {
        "model": configuration.model,
        "group": configuration.group,
        "order": Group.parse(configuration.group).order,
        "attention": configuration.arguments.get("attention"),
        "projection": configuration.arguments.get("projection"),
        "dims": configuration.arguments.get("dims"),
        "parameters": count_parameters(model),
        "convolution_macs": formula.convolution,
        "attention_macs": formula.attention,
        "counted_convolution_macs": counted.convolution,
        "counted_attention_macs": counted.attention,
        "parameter_macs": parameter_macs(model, x.shape[-1]),
    }
    return row | _paper_figures(row, x.shape[-1])


def _check_affordable(row: Mapping[str, Any], limit: float) -> None:
    total = (row["counted_convolution_macs"] + row["counted_attention_macs"]) / 1e9
    if total > limit:
        raise ValueError(f"takes {total:.3g} x 10^9 multiply-adds an image; raise --limit {limit:g} to measure it")


def _paper_figures(row: Mapping[str, Any], size: int) -> dict[str, float | None]:
    """The paper's Table 2 for a model and a group, where it has a row for them: 28 x 28 pixels, attention as in its code."""
    is_revit = (row["model"], row["attention"], row["projection"]) == ("revit", "spatial", "full")
    family = "G-CSA" if is_revit else "G-SA" if row["model"].startswith("gsa") else None
    for line in _paper_rows():
        if size == PAPER_SIZE and (line.family, line.group) == (family, row["group"]):
            return {"paper_mul_adds_m": line.values["mul_adds"].mean, "paper_memory_mb": line.values["memory"].mean}
    return {"paper_mul_adds_m": None, "paper_memory_mb": None}


@cache
def _paper_rows() -> list[PaperRow]:
    return list(paper_tables()["table2"].rows.values())


def _peak(configuration: Configuration, task: str, batch_size: int, size: int) -> int:
    """Peak bytes of a task, in the process that calls this."""
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    model = configuration.build()
    x = torch.randn(batch_size, 1, size, size)
    return forward_memory(model, x) if task == "forward" else step_memory(model, x)


def _interleaved(tasks: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each task. All run in every round, in an order drawn anew: a disturbance meets all of them alike."""
    seconds: list[list[float]] = [[] for _ in tasks]
    order = list(range(len(tasks)))
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):  # the first warms up
        shuffle(order)
        gc.collect()
        for i in order:
            start = time.perf_counter()
            tasks[i]()
            if number > 0:
                seconds[i].append(time.perf_counter() - start)
    return [median(values) for values in seconds]


COLUMNS = (
    "model", "group", "attention", "projec-\ntion", "param-\neters",
    "mul-adds\nweights", "(M) at-\ntention", "by\ntorch", "by pa-\nrams", "memory\nforward", "(MiB)\nstep",
    "ms/img\nforward", "\nstep", "paper\nM", "\nMB",
)  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal, without the columns in which none has a value."""
    lines = [_cells(row) for row in rows]
    shown = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i < 4 else "right", no_wrap=i > 0, overflow="fold")
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    counted = row["counted_convolution_macs"] + row["counted_attention_macs"]
    known = row["attention_macs"] or not row["counted_attention_macs"]  # else a layer has no formula
    return [
        row["model"], row["group"], row["attention"] or "", row["projection"] or "", f"{row['parameters'] / 1e3:.1f}K",
        _short(row["convolution_macs"] / 1e6), _short(row["attention_macs"] / 1e6) if known else "?", _short(counted / 1e6),
        _short(row["parameter_macs"] / 1e6), *(_short(row[f"{task}_bytes"] / 2**20) for task in ("forward", "step")),
        *(_short(1000 * row[f"{task}_seconds"]) for task in ("forward", "step")),
        *("" if row[key] is None else f"{row[key]:.2f}" for key in ("paper_mul_adds_m", "paper_memory_mb")),
    ]  # fmt: skip


def _short(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
