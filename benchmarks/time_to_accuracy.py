"""Time to 97.5 % validation accuracy on rotated MNIST: our recipe beside the released model with the released recipe.

revit train rotmnist_p4_fast --data-root DIR --out runs/fast
revit train rotmnist_p4 --data-root DIR --out runs/released        # stop it after some epochs with Ctrl-C
python benchmarks/time_to_accuracy.py runs/fast runs/released [--step SECONDS] [--out FILE]

Seconds of ours are those of its log. The released recipe takes 300 epochs of one cycle, hours on two cores: its accuracies are
those of the first epochs of our model of the same function, and its seconds the training steps of the model built on escnn, as
`run.py` measured them beside ours (or `--step`), without its validation. If it has not come to the accuracy in the epochs that
were run, the ratio is a lower bound.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, PICTURES, origin, write_report
from report import BLUE, VERMILLION, Line, Target, plot

GOAL, BATCH, IMAGES = 0.975, 64, 10_000


def epochs_of(run: Path) -> list[dict[str, float]]:
    with (run / "results.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def curve(run: Path, epoch_seconds: float | None = None) -> list[tuple[float, float]]:
    """Seconds since the start and validation accuracy after each epoch."""
    rows, total, found = epochs_of(run), 0.0, []
    for row in rows:
        total += row["seconds"] if epoch_seconds is None else epoch_seconds
        found.append((total, row["val_accuracy"]))
    return found


def reached(points: list[tuple[float, float]]) -> float | None:
    return next((seconds for seconds, accuracy in points if accuracy >= GOAL), None)


def reference_step() -> tuple[float, str]:
    """Seconds of a training step of the released model on escnn, and where that was measured."""
    report = json.loads((HERE / "results" / "latest.json").read_text())
    rounds = report["side_by_side"]["settings"]["p4"]["rounds"]
    return median(rounds["reference"]["step"]), f"{report['command']}, {report['commit'][:7]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path, help="the folder of a finished run")
    parser.add_argument("released", type=Path, help="the folder of a run of the released recipe, or of its beginning")
    parser.add_argument("--step", type=float, help="seconds of a step of the reference; default that of results/latest.json")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "time_to_accuracy.json")
    options = parser.parse_args()
    step, measured = (options.step, "--step") if options.step else reference_step()
    ours, released = curve(options.ours), curve(options.released, step * -(-IMAGES // BATCH))
    taken, theirs = reached(ours), reached(released)
    if taken is None:
        raise SystemExit(f"{options.ours}: validation accuracy did not come to {GOAL:.1%}; train longer")
    least = theirs or released[-1][0]
    bound = "" if theirs else "more than "
    print(f"ours {taken:.0f} s ({sum(seconds <= taken for seconds, _ in ours)} epochs); reference {bound}{least:.0f} s")
    target = Target(f"time to {GOAL:.1%} validation accuracy, reference over ours", least / taken, ">=", 5.0, unit="x")
    print(f"{target.verdict}: {target.name}: {bound}{target.value:.1f}{target.unit}, target {target.sign} {target.bound:g}")
    report: dict[str, Any] = {
        **origin("time_to_accuracy.py RUN_OF_OURS RUN_OF_THE_RELEASED_RECIPE"), "goal": GOAL, "reference_step_seconds": step,
        "reference_step_measured": measured, "ours": ours, "released": released, "released_reached": theirs is not None,
        "seconds": taken, "reference_seconds": least, "targets": [target.as_dict()],
    }  # fmt: skip
    write_report(report, options.out)
    lines = [
        Line("released recipe, model on escnn", *zip(*((s, 100 * a) for s, a in released), strict=True), "s--", VERMILLION),
        Line("rotmnist_p4_fast", *zip(*((s, 100 * a) for s, a in ours), strict=True), "o-", BLUE),
    ]
    words = {"title": "Rotated MNIST, two cores", "xlabel": "seconds of training", "ylabel": "validation accuracy [%]"}
    plot(lines, PICTURES / "time_to_accuracy.png", log=False, mark=100 * GOAL, **words)


if __name__ == "__main__":
    main()
