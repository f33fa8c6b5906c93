"""Processes to be killed: forked from one server that has imported everything and computed nothing, so each starts at once."""

from __future__ import annotations

import contextlib
import importlib
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
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
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


def call(module: str, function: str, log: str, *arguments: Any) -> None:
    """A function of a module of the suite; its first argument is the file that its result goes to."""
    _alone(f"{log}.log")
    getattr(importlib.import_module(module), function)(log, *arguments)


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


def ranks(count: int, words: list[str], folder: str, port: int) -> None:
    """`torchrun --nproc_per_node COUNT -m revit ...`: its agent, whose processes are forked and so need not import again."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.chdir(folder)
    os.environ["REVIT_CACHE"] = str(Path(folder) / "cache")
    _alone("out.txt")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id="faults", rdzv_backend="static", rdzv_configs={"rank": 0},
        rdzv_endpoint=f"127.0.0.1:{port}", max_restarts=0, start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, _rank)(words)
    except ChildFailedError:  # torchrun ends with a traceback of its own; what is looked at is what ours say
        sys.exit(1)


def _rank(words: list[str]) -> None:
    from revit.cli import main

    Path(f"rank{os.environ['RANK']}.{os.getpid()}.pid").touch()
    code = main(words)
    if code:
        sys.exit(code)


def _alone(log: str) -> None:
    """A session of its own, as a shell gives it; one thread; what it says goes to a file."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was started by a shell
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
