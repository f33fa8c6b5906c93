"""Keeps what a trial found on the validation images, for the section on choices of docs/results.md.

python benchmarks/keep_trial.py RUN NAME

RUN is a folder that `revit train ... --no-test` wrote (or a run with a test, whose scores are
left there, or one that was stopped).
`results/trials/NAME.json` gets its facts; `results/trials.yaml` says what was asked and what follows, and
`python benchmarks/tables.py` writes the page.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from revit.cli.runs import load_run

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "command", "commit", "started", "versions", "threads", "machine", "device", "data", "seed", "parameters", "epochs", "epoch",
    "training_seconds", "validation_accuracy",
)  # fmt: skip
FOLDERS = ("--data-root", "--out")


def without_folders(command: str) -> str:
    """A command as anybody can type it: where things lie on this machine is of no use elsewhere."""
    words = command.split()
    for option in FOLDERS:
        if option in words:
            words[words.index(option) + 1] = "DIR" if option == "--data-root" else "RUN"
    return " ".join(words)


def found_by(run: Path) -> dict[str, Any]:
    """The facts of a finished run, or what one that was stopped has found until then; and how it came there."""
    if not (run / "results.csv").is_file():
        raise SystemExit(f"{run}: no run with a finished epoch; name a folder that `revit train` wrote")
    with (run / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    history = {name: [float(row[name]) for row in rows] for name in ("train_accuracy", "val_accuracy")}
    for name in ("validation.json", "test.json"):
        if (run / name).is_file():
            facts = json.loads((run / name).read_text())
            return {**{key: facts[key] for key in KEPT}, **history}
    trained = load_run(run)
    facts = {
        **json.loads((run / "env.json").read_text()),
        "data": trained.spec.source,
        "seed": trained.recipe["train"]["seed"],
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "epochs": len(rows),
        "epoch": len(rows),
        "training_seconds": round(sum(float(row["seconds"]) for row in rows), 1),
        "validation_accuracy": float(rows[-1]["val_accuracy"]),
    }
    return {**{key: facts[key] for key in KEPT}, "epochs_planned": trained.recipe["train"]["epochs"], **history}


def main(run: Path, name: str) -> None:
    kept = found_by(run)
    kept["command"] = without_folders(kept["command"])
    path = ROOT / "results" / "trials" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept) + "\n")
    print(f"{path.relative_to(ROOT)}: {kept['validation_accuracy']:.2%} of the validation images")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2])
