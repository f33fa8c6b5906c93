"""Workers that die, raise or hang: an error that names what they were reading."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from revit.data import DataError
from revit.data import workers as module
from revit.data.loader import EvalLoader, Reading, TrainLoader
from tests.data.test_loader import SPEC, Partly


class Faulty(Partly):
    """Images of which one does something to the process that reads it."""

    def __init__(self, fault, sample=23):
        super().__init__(())
        self.fault, self.sample = fault, sample

    def read(self, index, crop=None):
        if index == self.sample:
            self.fault()
        return super().read(index, crop)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise IndexError("list index\nout of range")


def hang():
    time.sleep(600)


def test_a_killed_worker_is_named_by_its_sample():
    before = signal.getsignal(signal.SIGCHLD)
    loader = TrainLoader(Faulty(die), SPEC, batch_size=8, reading=Reading(workers=2))
    with pytest.raises(DataError, match="a process that reads images died .while reading toy/train/23.*--data.workers 0"):
        list(loader.batches(0))
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_raised_while_reading_is_named(workers):
    loader = EvalLoader(Faulty(fail), SPEC, batch_size=8, reading=Reading(workers=workers))
    with pytest.raises(DataError, match=r"^toy/train/23: reading it failed \(IndexError: list index out of range\)"):
        list(loader)


def test_a_hanging_worker_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(module, "MAX_LOOKS", 3)
    loader = TrainLoader(Faulty(hang), SPEC, batch_size=8, reading=Reading(workers=2))
    begin = time.monotonic()
    with pytest.raises(DataError, match="no image was read for 1 seconds .while reading toy/train/23"):
        list(loader.batches(0))
    assert time.monotonic() - begin < 10


def test_slow_workers_are_waited_for(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(module, "MAX_LOOKS", 4)

    class Slow(Partly):
        def read(self, index, crop=None):
            time.sleep(0.15)
            return super().read(index, crop)

    loader = EvalLoader(Slow((), 6), SPEC, batch_size=6, reading=Reading(workers=1))
    assert len(list(loader)) == 1


ORPHANS = """
import os, signal, threading, time
from revit.data.loader import EvalLoader, Reading
from tests.data.test_loader import SPEC, Partly

os.register_at_fork(after_in_child=lambda: time.sleep(1))  # workers begin when their parent is dead
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
list(EvalLoader(Partly(()), SPEC, batch_size=8, reading=Reading(workers=2)))
"""


def test_workers_end_with_a_parent_that_was_killed_while_they_began():
    words, root = [sys.executable, "-c", ORPHANS], Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=60)  # ends when the last process that could write has ended
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not errors
