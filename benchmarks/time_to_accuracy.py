"""Time to 97.5 % validation accuracy on rotated MNIST: our recipe beside the released model with the released recipe.

revit train rotmnist_p4_fast --data-root DIR --out runs/fast
revit train rotmnist_p4 --data-root DIR --out runs/released        # stop it after some epochs with Ctrl-C
python benchmarks/time_to_accuracy.py runs/fast runs/released [--rounds 7] [--out FILE]

Accuracies are those of the two runs, epoch by epoch; seconds are training steps, measured here side by side on two threads: our
model, and the released one built on escnn. Its own run would take hours: `rotmnist_p4`, which is that model with exact strides
and dropout of whole fields, takes its place. The released recipe has 300 epochs: if it has not come to the accuracy in those
that were run, the ratio is a lower bound.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contestants import REFERENCE, SETTINGS
from measure import HERE, PICTURES, THREADS, Disturbance, interleave, origin, write_report
from report import BLUE, VERMILLION, Line, Target, plot

from revit.models import create_model
from revit.training.recipe import read_recipe

GOAL, BATCH, IMAGES, RECIPE = 0.975, 64, 10_000, "rotmnist_p4_fast"
STEPS = -(-IMAGES // BATCH)


def measured_steps(rounds: int) -> dict[str, list[float]]:
    """Seconds of training steps of both models, taken in turns."""
    setting, options = SETTINGS["p4"], dict(read_recipe(RECIPE)["model"])
    ours = create_model(options.pop("name"), in_chans=1, num_classes=10, **options)
    tasks = {RECIPE: setting.step_task(ours), REFERENCE: setting.step_task(setting.builder(REFERENCE)())}
    return interleave(tasks, rounds=rounds)


def curve(run: Path, step: float) -> list[tuple[float, float]]:
    """Seconds of training and validation accuracy after each epoch."""
    with (run / "results.csv").open() as file:
        return [((i + 1) * STEPS * step, float(row["val_accuracy"])) for i, row in enumerate(csv.DictReader(file))]


def reached(points: list[tuple[float, float]]) -> float | None:
    return next((seconds for seconds, accuracy in points if accuracy >= GOAL), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path, help="the folder of a finished run")
    parser.add_argument("released", type=Path, help="the folder of a run of the released recipe, or of its beginning")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "time_to_accuracy.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    disturbance, rounds = Disturbance(), measured_steps(options.rounds)
    ours, released = (curve(run, median(rounds[name])) for run, name in ((options.ours, RECIPE), (options.released, REFERENCE)))
    taken, theirs = reached(ours), reached(released)
    if taken is None:
        raise SystemExit(f"{options.ours}: validation accuracy did not come to {GOAL:.1%}; train longer")
    least = theirs or released[-1][0]
    bound = "" if theirs else "more than "
    print(f"ours {taken:.0f} s ({sum(seconds <= taken for seconds, _ in ours)} epochs); reference {bound}{least:.0f} s")
    target = Target(f"time to {GOAL:.1%} validation accuracy, reference over ours", least / taken, ">=", 5.0, unit="x")
    print(f"{target.verdict}: {target.name}: {bound}{target.value:.1f}{target.unit}, target {target.sign} {target.bound:g}")
    report: dict[str, Any] = {
        **origin(f"time_to_accuracy.py RUN_OF_OURS RUN_OF_THE_RELEASED_RECIPE --rounds {options.rounds}"), "goal": GOAL,
        "rounds": rounds, "ours": ours, "released": released, "released_reached": theirs is not None, "seconds": taken,
        "reference_seconds": least, "targets": [target.as_dict()],
        "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)
    lines = [
        Line("released recipe, model on escnn", *zip(*((s, 100 * a) for s, a in released), strict=True), "s--", VERMILLION),
        Line(RECIPE, *zip(*((s, 100 * a) for s, a in ours), strict=True), "o-", BLUE),
    ]
    words = {"title": "Rotated MNIST, two cores", "xlabel": "seconds of training", "ylabel": "validation accuracy [%]"}
    plot(lines, PICTURES / "time_to_accuracy.png", log=False, mark=100 * GOAL, **words)


if __name__ == "__main__":
    main()
