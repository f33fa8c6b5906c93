"""Shared by all tests: two threads, fixed seeds, and the exact groups."""

import os

# Before torch starts its threads: those that wait by spinning take minutes instead of seconds beside any other process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

torch.set_num_threads(2)

EXACT_GROUPS = ["z2", "z2m", "p2", "p2m", "p4", "p4m"]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=EXACT_GROUPS)
def exact_group(request: pytest.FixtureRequest) -> str:
    return request.param
