"""Keys and values that are means of 2 x 2 pixels (`kv_reduction=2`) beside all of them: accuracy, and a training step.

python benchmarks/reduced_keys.py [--epochs 8] [--rounds 9] [--out FILE]

Joint attention on 14 x 14 positions, p4, trained on the 5,000 digits that come with the package. Needs the `train` extra.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import THREADS, Disturbance, interleave, median_ratio, options_of, origin, write_report
from report import human_seconds, table

from revit.cli import train
from revit.evaluation.memory import step_task
from revit.models import create_model

BATCH, SIZE, REDUCTIONS, NAME = 64, 28, (1, 2), "revit_tiny"
MODEL: dict[str, Any] = {
    "group": "p4", "dims": 16, "depths": 3, "num_heads": 1, "stride": 2, "kernel_size": 3, "attention": "joint",
    "neighbourhood": "global", "mlp_ratio": 2, "head_hidden": 24,
}  # fmt: skip


def accuracy(reduction: int, epochs: int, folder: Path) -> dict[str, Any]:
    """What `revit train` finds on the digits that were never seen."""
    words = ["demo", "--out", str(folder), "--train.epochs", str(epochs), "--model.kv_reduction", str(reduction)]
    for name, value in {"name": NAME, **MODEL}.items():
        words += [f"--model.{name}", str(value)]
    if code := train.run(words):
        raise SystemExit(code)
    scores = json.loads((folder / train.RESULT).read_text())
    kept = (
        "accuracy",
        "validation_accuracy",
        "images",
        "consistency_percent",
        "seed",
        "data",
        "parameters",
        "training_seconds",
    )
    return {name: scores[name] for name in kept}


def main() -> None:
    options = options_of(__doc__, "reduced_keys.json", epochs=8, rounds=9)
    torch.set_num_threads(THREADS)
    disturbance = Disturbance()
    with tempfile.TemporaryDirectory() as folder:
        found = {str(reduction): accuracy(reduction, options.epochs, Path(folder) / str(reduction)) for reduction in REDUCTIONS}
    images, tasks = torch.randn(BATCH, 1, SIZE, SIZE), {}
    for reduction in REDUCTIONS:
        model = create_model(NAME, in_chans=1, num_classes=10, kv_reduction=reduction, **MODEL).train()
        tasks[str(reduction)] = step_task(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images)
    seconds = interleave(tasks, rounds=options.rounds)
    rows = []
    for name, row in found.items():
        row["ratio"] = median_ratio(seconds["1"], seconds[name])
        cells = [f"{100 * row['accuracy']:.2f} %", human_seconds(median(seconds[name])), f"{row['ratio']:.2f}x"]
        rows.append([name, *cells])
    print(table(["kv_reduction", "test accuracy", "step", "times as fast"], rows))
    report = {
        **origin(f"reduced_keys.py --epochs {options.epochs} --rounds {options.rounds}"),
        "model": MODEL, "epochs": options.epochs, "batch": BATCH, "size": SIZE, "models": found, "rounds": seconds,
        "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)


if __name__ == "__main__":
    main()
