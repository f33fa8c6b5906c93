"""Keeps what a trial found on the validation images, for the section on choices of docs/results.md.

python benchmarks/keep_trial.py RUN NAME

RUN is a folder that `revit train ... --no-test` wrote (or a run with a test, whose scores are left there).
`results/trials/NAME.json` gets its facts; `results/trials.yaml` says what was asked and what follows, and
`python benchmarks/tables.py` writes the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


def main(run: Path, name: str) -> None:
    found = [run / name for name in ("validation.json", "test.json") if (run / name).is_file()]
    if not found:
        raise SystemExit(f"{run}: not a finished run")
    facts = json.loads(found[0].read_text())
    kept = {key: facts[key] for key in KEPT}
    kept["command"] = without_folders(kept["command"])
    path = ROOT / "results" / "trials" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {kept['validation_accuracy']:.2%} of the validation images")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2])
