"""`revit export RUN --format weights`: a finished run as a folder that `revit.from_pretrained` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from revit.cli.parser import UsageError
from revit.cli.runs import load_run
from revit.models import save_pretrained
from revit.training.run_folder import RunError

RESULT, AUDIT = "test.json", "audit.json"


def export_weights(run: Path, folder: Path, console: Console) -> None:
    """Writes the best weights of a finished run with its config, and a model card from its results."""
    if not run.is_dir():
        raise UsageError(f"{run}: weights are those of a run folder; train one with `revit train`")
    loaded = load_run(run)
    if loaded.checkpoint is None:
        raise UsageError(f"{run}: already a folder of weights; load it with revit.from_pretrained")
    save_pretrained(loaded.model, folder, data=loaded.spec.to_dict(), results=run_results(run))
    size = sum(file.stat().st_size for file in folder.iterdir())
    console.print(
        f"{folder}: {loaded.recipe['model']['name']} {loaded.group}, {size:,} bytes; load it with"
        f" revit.from_pretrained({str(folder)!r})",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def run_results(run: Path) -> dict[str, Any]:
    """What a finished run has measured: its scores on the test images, and what turning them changes."""
    if not (run / RESULT).is_file():
        if not (run / "config.yaml").is_file():  # converted: never a run of ours
            raise RunError(f"{run}: has no {RESULT}, which a model card is written from; name a run, or call save_pretrained")
        raise RunError(f"{run}: has no {RESULT}, so it has not finished; go on with `revit train {run} --resume`")
    results: dict[str, Any] = json.loads((run / RESULT).read_text())
    if (run / AUDIT).is_file():
        relative = json.loads((run / AUDIT).read_text())["audit"]["stages"].get("logits", {}).get("relative")
        results["equivariance_error"] = max(relative) if relative else None
    return results
