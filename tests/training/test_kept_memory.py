"""Freed memory that a training asks for again is not fetched from the system a second time."""

import subprocess
import sys

import pytest

from revit.training.kept_memory import keep_memory

FAULTS = """
import resource, sys, torch
if sys.argv[1] == "keep":
    from revit.training.kept_memory import keep_memory
    assert keep_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for step in range(8):
    if step == 3:  # whatever is set up in the first ones is not counted
        before = faults()
    torch.zeros(2**24)  # 64 MiB
print(faults() - before)
"""


def page_faults(word):
    done = subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_pages_are_fetched_once():
    assert page_faults("keep") < 1000 < 5000 < page_faults("leave")


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_memory() is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())  # a C library without mallopt
    assert keep_memory() is False
