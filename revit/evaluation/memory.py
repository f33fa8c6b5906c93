"""How much memory a task takes at most, and tasks to ask that of: a forward pass and a training step."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.context
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.evaluation.inference import evaluating

Task = Callable[[], object]
P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 2  # images of a first run that loads libraries and makes the state of the optimizer
_M_MMAP_THRESHOLD = -3  # of malloc.h
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(task: Task) -> int:
    """Bytes by which the resident size of this process rises at most above its present value while the task runs.

    Memory that was freed before, but not given back to the system, is used again and not seen: see `in_fresh_process`. What
    glibc keeps of it is given back first.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text("5")  # the high-water mark falls to the present resident size
    except OSError:
        before = _max_resident()
        task()
        return _max_resident() - before
    before = _status("VmRSS")
    task()
    return _status("VmHWM") - before


def give_back_freed_memory() -> None:
    """From now on memory that is freed goes back to the system at once, so that peaks are those of what is in use.

    The C library keeps freed pieces otherwise, and what a step has freed in one size is of no use to another. Only glibc has
    the setting; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def in_fresh_process(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """What a function of a module returns when called in a new process, in which nothing has been computed before.

    Where the system can, the process is split off one that has only imported the module: that saves the seconds of importing.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        context: multiprocessing.context.BaseContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__])
    else:
        context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, function, arguments, options), daemon=True)  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the measuring process ended with code {process.exitcode}: out of memory?") from None
    process.join()
    if error is not None:
        raise error
    return result


def _report(sender: Connection, function: Callable[..., object], arguments: Any, options: Any) -> None:
    try:
        result = function(*arguments, **options)
    except Exception as error:
        sender.send((None, error))
    else:
        sender.send((result, None))


def forward_memory(model: nn.Module, x: Tensor) -> int:
    """Peak bytes of one forward pass without gradients, beyond the model and its images. Call it in a fresh process."""
    forward_task(model, x[:WARM_UP])()
    return peak_memory(forward_task(model, x))


def step_memory(model: nn.Module, x: Tensor) -> int:
    """Peak bytes of one training step beyond the model, its images and AdamW's state. Call it in a fresh process."""
    optimizer = torch.optim.AdamW(model.parameters())
    step_task(model, optimizer, x[:WARM_UP])()
    return peak_memory(step_task(model, optimizer, x))


def forward_task(model: nn.Module, x: Tensor) -> Task:
    """A forward pass in evaluation mode, without gradients."""

    def forward() -> None:
        with evaluating(model):
            model(x)

    return forward


def step_task(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Task:
    """A training step: forward, cross-entropy with class 0, backward, step of the optimizer."""

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss_of_class_0(model(x)).backward()
        optimizer.step()

    return step


def loss_of_class_0(logits: Tensor) -> Tensor:
    """The cross-entropy of logits [B, K], or of maps [B, K, H, W], if the truth were class 0 everywhere."""
    labels = torch.zeros(len(logits), *logits.shape[2:], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, labels)


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def _max_resident() -> int:
    """The high-water mark where it cannot be reset: an increase is missed if an earlier one was higher."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
