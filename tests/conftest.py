"""Shared by all tests: two threads, fixed seeds, and the exact groups."""

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
