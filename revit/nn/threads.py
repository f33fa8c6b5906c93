"""Threads that each compute a part alone.

An operation on a part that fits the cache takes some ten microseconds to a millisecond. Split between cores, much of that goes
into waiting for each other, and all of it if a neighbour on the machine takes a core away. So cores get samples of their own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

P = TypeVar("P")
T = TypeVar("T")

OPENMP, PAUSE_SOFT = "libgomp.so.1", 1
WORKERS = 256
"""More than torch has threads: a worker is started only when all others are busy."""


def on_threads(work: Callable[[list[P]], T], parts: list[P]) -> list[T]:
    """Shares the parts out among as many threads as torch may use, this one among them: what `work` gives for each share."""
    threads = torch.get_num_threads()
    shares = [share for i in range(threads) if (share := parts[i::threads])]
    if len(shares) < 2:
        return [work(parts)]
    alone = torch.no_grad()(work)
    end_waiting_threads()
    try:
        others = [_workers().submit(alone, share) for share in shares[1:]]
        torch.set_num_threads(1)
        try:
            first = alone(shares[0])
        finally:
            wait(others)  # whatever happens: they read and write what the caller owns
        return [first, *(other.result() for other in others)]
    finally:
        torch.set_num_threads(threads)  # that of each thread, but also the one that later threads start with


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads that stay: a new one would have to fetch its memory from the system page by page."""
    return ThreadPoolExecutor(max_workers=WORKERS, initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a copy of the process has none of its threads


def end_waiting_threads() -> bool:
    """Ends the threads that this one's last parallel operation has left behind: they go on spinning for milliseconds, in case
    another one follows, and would take a core from ours. The next parallel operation starts new ones. Nothing happens, and
    the answer is False, where torch does not use GNU's OpenMP."""
    pause = _pause()
    return pause is not None and pause(PAUSE_SOFT) == 0


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` (OpenMP 5.0) of the library that torch has loaded."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL(OPENMP, mode=os.RTLD_NOLOAD).omp_pause_resource_all
        return found
    except (OSError, AttributeError):
        return None
