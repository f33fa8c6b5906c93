"""Threads that each compute a part alone: who works, what comes back, what is left behind."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from revit.nn.threads import end_waiting_threads, on_threads


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_shares_go_to_this_thread_and_to_others_which_compute_alone():
    def work(parts):
        assert not torch.is_grad_enabled()
        return parts, threading.get_ident(), torch.get_num_threads()

    found = on_threads(work, list(range(5)))
    assert [parts for parts, _, _ in found] == [[0, 2, 4], [1, 3]]
    assert found[0][1] == threading.get_ident() != found[1][1]
    assert {count for _, _, count in found} == {1} and torch.get_num_threads() == 2
    assert on_threads(sum, [7]) == [7]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_any_share_is_raised_and_threads_are_given_back(broken):
    def work(parts):
        if broken in parts:
            raise ValueError(f"part {broken}")

    with pytest.raises(ValueError, match=f"part {broken}"):
        on_threads(work, [0, 1])
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process in /proc")
def test_waiting_threads_are_ended_and_come_back():
    tasks = Path(f"/proc/{os.getpid()}/task")
    x = torch.randn(512, 512)
    torch.mm(x, x)  # a parallel operation leaves its threads behind
    before = len(list(tasks.iterdir()))
    assert end_waiting_threads()
    assert len(list(tasks.iterdir())) == before - 1
    expected = x.double() @ x.double()
    torch.testing.assert_close((x @ x).double(), expected, rtol=0, atol=1e-3)
    assert len(list(tasks.iterdir())) == before
