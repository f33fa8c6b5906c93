"""Result files: one JSON for each thing that was run, with what it needs to be believed.

Tables and figures read nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revit.data.cache import whole_file
from revit.reproduce.plan import Experiment

NEEDED = ("kind", "recipe", "budget", "seed", "values", "command", "commit", "versions", "data", "data_fingerprint", "options")


class ResultError(ValueError):
    """A result file that cannot be used. The message names it and says what to do."""


@dataclass(frozen=True)
class Result:
    """What a result file holds."""

    path: Path
    facts: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.facts["values"])


def write_result(folder: Path, experiment: Experiment, budget: str, seed: int, facts: dict[str, Any]) -> Result:
    """Writes a result file, whole or not at all."""
    path = folder / experiment.file_name(budget, seed)
    named = {"kind": experiment.kind, "recipe": experiment.recipe, "budget": budget, "seed": seed}
    if experiment.group is not None:
        named |= {"group": experiment.group, "weights": experiment.weights}
    whole = {**named, **facts}
    _check(path, whole)
    with whole_file(path) as file:
        file.write(json.dumps(whole, indent=1, allow_nan=False).encode())
    return Result(path, whole)


def read_result(folder: Path, experiment: Experiment, budget: str, seed: int) -> Result | None:
    """The result of an experiment if it was obtained."""
    path = folder / experiment.file_name(budget, seed)
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read ({error}); delete it and run again") from error
    _check(path, facts)
    return Result(path, facts)


def _check(path: Path, facts: Any) -> None:
    missing = [name for name in NEEDED if name not in facts] if isinstance(facts, dict) else list(NEEDED)
    if missing:
        raise ResultError(f"{path}: not a result file, it has no {', '.join(missing)}; delete it and run again")
