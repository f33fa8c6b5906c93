"""What the scenarios share: small checkpoints, runs of all kinds, and when two of them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from revit.data.augment import AugmentOptions
from revit.training.checkpoint import Checkpoint, read_latest, write_checkpoint

RUNS: list[dict[str, Any]] = [
    {},
    {"workers": 2},
    {"ema": 0.9, "workers": 2, "accumulate": 2},
    {"schedule": "cosine", "accumulate": 2},
    {"precision": "bf16", "ema": 0.9},
    {"augment": AugmentOptions(rotate=180, shift=1, brightness=0.2, crop_scale=0.5, cutmix=1.0)},
]
"""Kinds of runs, three epochs of five steps each: OneCycle unless it says otherwise."""


def write(folder: Path, number: int) -> None:
    """A checkpoint that says which save it is of in each of its files. Small: the threads of torch do not survive a fork."""
    write_checkpoint(
        folder,
        model={"w": torch.full((100, 100), float(number)), "n": torch.tensor(number)},
        config={"number": number},
        trainer={"optimizer/w/exp_avg": torch.full((100, 100), -float(number))},
        state={"epoch": number},
    )


def number_of(checkpoint: Checkpoint) -> int:
    """Which save it is of; all four files must be of the same one."""
    number = checkpoint.state["epoch"]
    assert checkpoint.config == {"number": number}, "config.json of another save"
    assert checkpoint.model["n"] == number and (checkpoint.model["w"] == number).all(), "weights of another save"
    assert (checkpoint.trainer["optimizer/w/exp_avg"] == -number).all(), "optimiser of another save"
    return int(number)


def assert_same_run(path: Path, other: Path) -> None:
    """Weights, average, optimiser and history are the same bits, in the last and in the best checkpoint."""
    for which in ("last", "best"):
        one, two = (read_latest(folder / "checkpoints" / which) for folder in (path, other))
        for mine, theirs in ((one.model, two.model), (one.trainer, two.trainer)):
            assert mine.keys() == theirs.keys(), "other tensors"
            changed = [name for name in mine if not torch.equal(mine[name], theirs[name])]
            assert not changed, f"{which}: {changed[0]} differs"
        assert _timeless(one.state) == _timeless(two.state), f"{which}: another history"


def _timeless(state: dict[str, Any]) -> dict[str, Any]:
    timing = {"seconds", "waiting", "images_per_second", "waiting_for_data"}
    rows = [{k: v for k, v in row.items() if k not in timing} for row in state["history"]]
    return {**{k: v for k, v in state.items() if k not in timing}, "history": rows}
