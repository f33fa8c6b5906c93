"""Checkpoints that say which save they are of."""

from pathlib import Path

import torch

from revit.training.checkpoint import Checkpoint, write_checkpoint


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
