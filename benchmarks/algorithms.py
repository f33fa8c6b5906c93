"""The Fourier algorithm of group convolutions beside the dense one: the same function from the same parameters.

python benchmarks/algorithms.py [--seconds 240] [--draw SEED] [--out FILE] [--fit]

Three parts: the shapes that targets are set for, the growth with the order of the group, and `auto` beside `dense` at shapes
drawn at random. `--fit` measures both algorithms at random shapes instead and prints the rates of `revit/nn/algorithm.py`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import HERE, PICTURES, THREADS, Disturbance, median_ratio, origin, wait_for_quiet, write_report
from report import BLUE, VERMILLION, Line, Target, human_seconds, plot, slope, table

from revit.groups import Group
from revit.nn import GroupConv, GroupLinear
from revit.nn.algorithm import Work

SIDE, BATCH, LEAST = 14, 16, 0.02  # LEAST seconds are timed at once
QKV, WIDER, NARROWER = 3, 4, 1 / 4  # fields of q, k and v, and of the MLP there and back, for each field of the input
PASSES = ("training", "inference")


class Shape(NamedTuple):
    """A layer of `fields` -> `times * fields` fields, at least one, on `batch` maps of side x side pixels."""

    group: str
    kernel_size: int
    fields: int
    times: float
    side: int = SIDE
    batch: int = BATCH

    def layer(self, algorithm: str) -> GroupConv | GroupLinear:
        torch.manual_seed(0)
        out = self.out_fields
        if self.kernel_size == 1:
            return GroupLinear(self.group, self.fields, out, bias=False, algorithm=algorithm)
        padding = self.kernel_size // 2
        return GroupConv(
            self.group,
            self.fields,
            out,
            self.kernel_size,
            padding=padding,
            bias=False,
            filters="steerable",
            algorithm=algorithm,
        )

    @property
    def out_fields(self) -> int:
        return max(1, int(self.times * self.fields))

    @property
    def products(self) -> int:
        """Of the dense algorithm, in a forward pass."""
        return self.layer("dense").multiply_adds(self.side, self.side) * self.batch

    @property
    def passes_in_fourier(self) -> list[str]:
        """The passes in which `auto` does not take `dense`."""
        algorithm = self.layer("auto").algorithm
        return [name for name in PASSES if algorithm.is_fourier(self.side**2, training=name == "training")]

    def __str__(self) -> str:
        kernel = f"{self.kernel_size} x {self.kernel_size}"
        return f"{self.group} {kernel}, {self.fields} -> {self.out_fields}, {self.batch} maps of {self.side} px"


TARGETS = {
    **{Shape(group, 5, fields, QKV): bound for group in ("p8", "p4m") for fields, bound in ((48, 2.0), (96, 4.0))},
    **{Shape(group, 5, 48, QKV): 4.0 for group in ("p16", "p8m")},
    **{Shape(group, 1, 128, WIDER): 1.5 for group in ("p8", "p4m")},
    **{Shape(group, 1, 128, WIDER): 2.5 for group in ("p16", "p8m")},
}
ALSO = [
    *(Shape(group, 3, fields, QKV) for group in ("p8", "p4m") for fields in (48, 96)),
    *(Shape(group, 3, 48, QKV) for group in ("p16", "p8m")),
    *(Shape("p4", size, fields, QKV) for size in (3, 5) for fields in (48, 96)),
    *(Shape("p8", 5, 48, QKV, batch=batch) for batch in (2, 64)),
    *(Shape(group, 5, 12, QKV) for group in ("p4", "p8", "p4m", "p16")),
]
GROWTH = ("p4", "p8", "p12", "p16")
WORST, SLOPE = 0.95, 1.25


def tasks(shape: Shape, algorithms: tuple[str, ...]) -> dict[str, dict[str, Callable[[], None]]]:
    """What is timed: {pass: {algorithm: task}}."""
    order = Group.parse(shape.group).order
    x = torch.randn(shape.batch, shape.fields, order, shape.side, shape.side, requires_grad=True)
    grad = torch.randn(shape.batch, shape.out_fields, order, shape.side, shape.side)

    def step(layer: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            layer.zero_grad()
            layer(x).backward(grad)

        return run

    def forward(layer: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                layer(x)

        return run

    layers = {name: shape.layer(name) for name in algorithms}
    makers = zip(PASSES, (step, forward), strict=True)
    return {name: {key: make(layer) for key, layer in layers.items()} for name, make in makers}


def seconds(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Of one call in each round; all take turns, and short calls are repeated."""
    repeats = {}
    for name, task in contestants.items():
        task()
        start = time.perf_counter()
        task()
        repeats[name] = max(1, int(LEAST / (time.perf_counter() - start)))
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, task in contestants.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                task()
            found[name].append((time.perf_counter() - start) / repeats[name])
    return found


def compare(shape: Shape, other: str, rounds: int) -> dict[str, Any]:
    """`dense` beside another algorithm: seconds of each, and how many times as fast the other is."""
    wait_for_quiet()
    row: dict[str, Any] = {"shape": shape._asdict(), "algorithm": other}
    for name, contestants in tasks(shape, ("dense", other)).items():
        found = seconds(contestants, rounds)
        row[name] = {
            "dense": median(found["dense"]), "other": median(found[other]), "ratio": median_ratio(found["dense"], found[other])
        }  # fmt: skip
    return row


def show(rows: list[dict[str, Any]], bounds: dict[Shape, float] | None = None) -> None:
    cells = []
    for row in rows:
        shape = Shape(**row["shape"])
        training, inference = row["training"], row["inference"]
        bound = "" if not bounds or shape not in bounds else f">= {bounds[shape]:g}"
        times = [human_seconds(training[key]) for key in ("dense", "other")]
        cells.append([str(shape), *times, f"{training['ratio']:.2f}x", bound, f"{inference['ratio']:.2f}x"])
    name = rows[0]["algorithm"]
    print(table(["layer", "dense, both passes", name, "ratio", "target", "ratio, forward"], cells) + "\n", flush=True)


def worst(row: dict[str, Any]) -> float:
    """The least ratio of the passes in which the choice is not dense."""
    return min(row[name]["ratio"] for name in row["chosen"])


def random_shapes(rng: random.Random, count: int) -> list[Shape]:
    """Layers of all kinds of models, none larger than a minute of the whole run."""
    found: list[Shape] = []
    while len(found) < count:
        times = rng.choice((1, QKV, WIDER, NARROWER))
        fields = rng.choice((4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))
        shape = Shape(
            rng.choice(("z2", "z2m", "p4", "p6", "p8", "p12", "p16", "p4m", "p8m")), rng.choice((1, 3, 5)), fields, times,
            rng.choice((4, 7, 10, 14, 20, 28)), rng.choice((8, 16, 32, 64)),
        )  # fmt: skip
        if shape.products < 2e10 and shape.products / (shape.batch * shape.side**2) < 5e7 and shape not in found:
            found.append(shape)
    return found


def growth(rounds: int) -> dict[str, Any]:
    """Seconds of the convolutions of one block in training (q/k/v, projection, MLP) at 48 fields, by group."""
    found: dict[str, Any] = {"groups": {}}
    for group in GROWTH:
        shapes = (
            Shape(group, 5, 48, QKV), Shape(group, 1, 48, 1),
            Shape(group, 1, 48, WIDER), Shape(group, 1, 48 * WIDER, NARROWER),
        )  # fmt: skip
        sums = dict.fromkeys(("dense", "auto"), 0.0)
        for shape in shapes:
            wait_for_quiet()
            taken = seconds(tasks(shape, ("dense", "auto"))["training"], rounds)
            for name in sums:
                sums[name] += median(taken[name])
        found["groups"][group] = sums
    orders = [Group.parse(group).order for group in GROWTH]
    for name in ("dense", "auto"):
        found[f"slope_{name}"] = slope(orders, [found["groups"][group][name] for group in GROWTH])
    return found


def show_growth(found: dict[str, Any]) -> None:
    cells = [[group, human_seconds(row["dense"]), human_seconds(row["auto"])] for group, row in found["groups"].items()]
    cells.append(["log-log slope", f"{found['slope_dense']:.2f}", f"{found['slope_auto']:.2f}"])
    print(table(["the convolutions of a block, 48 fields", "dense", "auto"], cells) + "\n", flush=True)


def draw_growth(found: dict[str, Any], path: Path) -> None:
    """Cost against the order of the group."""
    orders = [Group.parse(group).order for group in found["groups"]]
    styles = {"dense": ("s--", VERMILLION), "auto": ("o-", BLUE)}
    lines = [
        Line(f"{name}, slope {found[f'slope_{name}']:.2f}", orders, [row[name] for row in found["groups"].values()], *style)
        for name, style in styles.items()
    ]
    title = "Convolutions of a block in training, 48 fields"
    plot(lines, path, title=title, xlabel="elements of the group", ylabel="seconds")


def counts(shape: Shape) -> tuple[list[float], list[float]]:
    """What the seconds of both algorithms are made of, in the order of `Rates`."""
    functions = shape.layer("fourier").filters.num_functions
    work = Work(Group.parse(shape.group), shape.fields, shape.out_fields, shape.kernel_size, functions)
    positions, order = shape.side**2 * shape.batch, work.group.order
    moved = order * (work.in_fields + work.out_fields)
    dense = [1, work.dense_products * positions, moved * positions]
    fourier = [work.block_products, order * work.out_fields, work.read, work.seen, work.seen_products]
    return dense, [1, *(count * positions for count in fourier)]


def fit(limit: float) -> None:
    """Least squares of relative errors, without negative rates."""
    from scipy.optimize import nnls

    deadline, measured = time.monotonic() + limit, []
    for shape in random_shapes(random.Random(1), 2000):
        if time.monotonic() > deadline:
            break
        shape = shape._replace(batch=random.Random(str(shape)).choice((1, 8, 32)))
        measured.append((counts(shape), compare(shape, "fourier", 3)))
    print(f"{len(measured)} shapes")
    for name in PASSES:
        for i, key in enumerate(("dense", "other")):
            rows = np.array([np.array(count[i]) / row[name][key] for count, row in measured])
            rates, _ = nnls(rows, np.ones(len(rows)))
            errors = np.quantile(rows @ rates, [0.05, 0.5, 0.95])
            print(f"{name} {key}: {', '.join(f'{rate:.3g}' for rate in rates)}   predicted / measured: {errors.round(2)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="for shapes at random, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draw", type=int, default=0, help="seed of the shapes at random, default %(default)s")
    parser.add_argument("--fit", action="store_true", help="measure the rates of revit/nn/algorithm.py instead")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "algorithms.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.fit:
        fit(options.seconds)
        return
    disturbance = Disturbance()
    fixed = [compare(shape, "fourier", options.rounds) for shape in [*TARGETS, *ALSO]]
    show(fixed, TARGETS)
    grown = growth(options.rounds)
    show_growth(grown)
    deadline, drawn = time.monotonic() + options.seconds, []
    same = 0
    for shape in random_shapes(random.Random(options.draw), 1000):
        if time.monotonic() > deadline:
            break
        if chosen := shape.passes_in_fourier:
            drawn.append(compare(shape, "auto", options.rounds) | {"chosen": chosen})
        else:
            same += 1
    again = [row for row in drawn if worst(row) < WORST]
    print(f"auto beside dense at {len(drawn)} shapes drawn at random; measured again, since below {WORST}: {len(again)}")
    print(f"{same} more take dense in both passes, and so the same code")
    for row in again:  # equal algorithms differ by more than that on a busy machine: more rounds tell
        row.update(compare(Shape(**row["shape"]), "auto", 5 * options.rounds))
    show(sorted(drawn, key=worst)[:8])
    targets = [
        Target(str(shape), row["training"]["ratio"], ">=", TARGETS[shape], unit="x")
        for shape, row in ((Shape(**row["shape"]), row) for row in fixed) if shape in TARGETS
    ]  # fmt: skip
    targets.append(Target("growth with the order of the group, log-log slope", grown["slope_auto"], "<=", SLOPE))
    for name in PASSES:
        ratios = [row[name]["ratio"] for row in drawn if name in row["chosen"]]
        name = f"auto beside dense where it is fourier, the worst of {len(ratios)}, {name}"
        targets.append(Target(name, min(ratios), ">=", WORST, unit="x"))
    report = {
        **origin(f"algorithms.py --seconds {options.seconds:g} --rounds {options.rounds} --draw {options.draw}"),
        "fixed": fixed, "growth": grown, "drawn": drawn, "drawn_dense": same,
        "targets": [target.as_dict() for target in targets], "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)
    draw_growth(grown, PICTURES / "growth.png")
    for target in targets:
        print(f"{target.verdict:6} {target.name}: {target.value:.2f}{target.unit}, target {target.sign} {target.bound:g}")


if __name__ == "__main__":
    main()
