"""Processes to be killed: forked from one server that has imported everything and computed nothing, so each starts at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults import cases
from tests.training.runs import KillAt, make_training

PRELOADED = [
    "tests.faults.victims",
    "revit.cli.train",
    "revit.evaluation.figures",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
]


def start(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Runs a function of this module in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def wait_for(condition: Callable[[], object], process: multiprocessing.process.BaseProcess, seconds: float = 120) -> None:
    """Until the condition holds. Sleeps are counted and not the clock, so that a machine that stops us is no failure."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        assert process.is_alive(), "the process ended before it could be hit"
        time.sleep(0.01)
    raise AssertionError("the process did not get there")


def train(path: str, case: dict[str, Any], resume: bool) -> None:
    """One of the small runs, from the start or from its last checkpoint."""
    _alone(f"{path}.log")
    training = make_training(Path(path), watcher=KillAt(), **case)
    if resume:
        training.resume()
    training.run()


def save_for_ever(folder: str, first: int, completed: int) -> None:
    """Saves one checkpoint after the other; each completed one is told to the pipe `completed`."""
    while True:
        cases.write(Path(folder), first)
        os.write(completed, first.to_bytes(8, "little"))
        first += 1


def command(words: list[str], folder: str, before: str = "") -> None:
    """`revit ...` in a folder, with what it prints in `out.txt`; `before` names a function of `tests.faults.sabotage`."""
    os.chdir(folder)
    os.environ["REVIT_CACHE"] = str(Path(folder) / "cache")
    os.environ.pop("REVIT_DEBUG", None)
    _alone("out.txt")
    if before:
        from tests.faults import sabotage

        getattr(sabotage, before)()
    from revit.cli import main

    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(words))


def _alone(log: str) -> None:
    """A session of its own, as a shell gives it; one thread; what it says goes to a file."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was started by a shell
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
