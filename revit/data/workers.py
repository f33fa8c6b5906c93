"""Processes that read ahead, and are watched: one that dies or hangs ends in an error that names what it was reading."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from revit.data.spec import DataError

LOOK_SECONDS = 5.0
MAX_LOOKS = 9
"""Workers that are silent are looked at every 5 seconds. Nine looks without another image in work: they hang."""

T = TypeVar("T")


class Watch:
    """What each worker is reading, in memory that all processes see: a row (process, sample or -1) for each."""

    def __init__(self, workers: int) -> None:
        self.table = torch.full((max(1, workers), 2), -1, dtype=torch.int64)
        if workers:
            self.table.share_memory_()

    def reads(self, sample: int) -> None:
        """Notes what this process begins to read; -1 for nothing."""
        info = get_worker_info()
        row = self.table[info.id if info else 0]
        row[0], row[1] = os.getpid(), sample

    @property
    def here(self) -> int:
        """What this process is reading."""
        info = get_worker_info()
        return int(self.table[info.id if info else 0, 1])

    def reading(self) -> list[tuple[int, int]]:
        """Processes that are in the middle of a sample, and which."""
        return [(process, sample) for process, sample in self.table.tolist() if sample >= 0]


def read_ahead(reader: TorchDataset[T], count: int, workers: int, watch: Watch, name: Callable[[int], str]) -> Iterator[T]:
    """Items 0 to `count` - 1 of a reader that notes in `watch` what it reads."""
    if not workers:
        for i in range(count):
            yield reader[i]
        return
    items = _started(reader, workers)
    looks, before = 0, watch.table.clone()
    while count:
        try:
            item = next(items)
        except (RuntimeError, OSError, EOFError) as error:
            living = {child.pid for child in multiprocessing.active_children()}
            dead = [sample for process, sample in watch.reading() if process not in living]
            if "timed out" not in str(error):
                raise DataError(f"a process that reads images died ({_where(dead, name)}); {_FIX}") from error
            # Looks are counted, not seconds: a computer that slept, or processes that were stopped for a while, are no hang.
            looks = looks + 1 if torch.equal(before, watch.table) else 0
            before = watch.table.clone()
            if looks < MAX_LOOKS:
                continue
            hanging = [(process, sample) for process, sample in watch.reading() if process in living]
            for process, _ in hanging:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            seconds, where = looks * LOOK_SECONDS, _where([sample for _, sample in hanging], name)
            raise DataError(f"no image was read for {seconds:.0f} seconds ({where}); {_FIX}") from error
        looks, count = 0, count - 1
        yield item


_FIX = "look at this file and its disk, and at the memory; --data.workers 0 reads in the training process"


def _where(samples: list[int], name: Callable[[int], str]) -> str:
    names = [name(sample) for sample in samples[:4]]
    return f"while reading {' and '.join(names)}" if names else "between two images"


def _started(reader: TorchDataset[T], workers: int) -> Iterator[T]:
    """Starts the workers. torch would have the death of one raise wherever the training process just is, in the middle of a
    step or of a save; we ask for it when we wait for data, where the error can name what was being read."""
    before = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: the user said so
        loader = DataLoader(
            reader, batch_size=None, shuffle=False, num_workers=workers, worker_init_fn=_quiet_worker, prefetch_factor=4,
            timeout=LOOK_SECONDS,
        )  # fmt: skip
        items = iter(loader)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)
    return items


def _quiet_worker(_: int) -> None:
    """Ctrl-C reaches every process of a terminal; only the training process answers it. One thread a worker is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """torch's workers compare their parent with the one that they began with, so one whose parent was killed while it began
    would stay for ever, and with it the lock of the run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
