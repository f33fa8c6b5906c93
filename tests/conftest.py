"""Shared by all tests: two threads, fixed seeds, the exact groups, and a browser."""

import shutil
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
