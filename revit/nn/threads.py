"""Threads that each compute a part alone.

An operation on a part that fits the cache takes some ten microseconds to a millisecond. Split between cores, much of that goes
into waiting for each other, and all of it if a neighbour on the machine takes a core away. So cores get samples of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

P = TypeVar("P")
T = TypeVar("T")


def on_threads(work: Callable[[list[P]], T], parts: list[P]) -> list[T]:
    """Shares the parts out among as many threads as torch may use: what `work` gives for the parts of each."""
    threads = torch.get_num_threads()
    shares = [share for i in range(threads) if (share := parts[i::threads])]
    if len(shares) < 2:
        return [work(parts)]
    try:
        with ThreadPoolExecutor(len(shares), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(work), shares))
    finally:
        torch.set_num_threads(threads)  # that of each thread, but also the one that later threads start with
