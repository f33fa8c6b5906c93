"""What the scenarios share: small checkpoints, runs of all kinds, and when two of them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from revit.data.augment import AugmentOptions
from revit.training.checkpoint import read_latest
from tests.training.checkpoints import number_of as number_of
from tests.training.checkpoints import write as write

RUNS: list[dict[str, Any]] = [
    {},
    {"workers": 2},
    {"ema": 0.9, "workers": 2, "accumulate": 2},
    {"schedule": "cosine", "accumulate": 2},
    {"precision": "bf16", "ema": 0.9},
    {"augment": AugmentOptions(rotate=180, shift=1, brightness=0.2, crop_scale=0.5, cutmix=1.0)},
]
"""Kinds of runs, three epochs of five steps each: OneCycle unless it says otherwise."""


def assert_same_run(path: Path, other: Path) -> None:
    """Weights, average, optimiser and history are the same bits, in the last and in the best checkpoint."""
    for which in ("last", "best"):
        one, two = (read_latest(folder / "checkpoints" / which) for folder in (path, other))
        for mine, theirs in ((one.model, two.model), (one.trainer, two.trainer)):
            assert mine.keys() == theirs.keys(), "other tensors"
            changed = [name for name in mine if not torch.equal(mine[name], theirs[name])]
            assert not changed, f"{which}: {changed[0]} differs"
        for row, their_row in zip(_timeless(one.state), _timeless(two.state), strict=True):
            assert row == their_row, f"{which}: another history, {sorted(row.items() ^ their_row.items())}"


def _timeless(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The state and the rows of its history, without the times."""
    timing = {"seconds", "waiting", "images_per_second", "waiting_for_data"}
    rows = [{name: value for name, value in state.items() if name != "history"}, *state["history"]]
    return [{name: value for name, value in row.items() if name not in timing} for row in rows]
