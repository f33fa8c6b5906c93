"""Products of matrices are products, whichever library computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from revit.nn import matrix_products
from revit.nn.matrix_products import LARGE, add_product, mkl_is_slow, multiply, onednn_linear

SHAPES = {"small": (3, 4, 5, 6), "large": (2, 150, 210, 160)}  # N, R, K, C


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found out about this machine is found out anew, before and after."""
    for known in (mkl_is_slow, onednn_linear):
        known.cache_clear()
    yield
    for known in (mkl_is_slow, onednn_linear):
        known.cache_clear()


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both, on a processor of any maker."""
    monkeypatch.setattr(matrix_products, "mkl_is_slow", lambda: request.param == "onednn")
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SHAPES)
def test_products_are_those_of_the_definition(library: str, size: str, transposed: bool, dtype: torch.dtype) -> None:
    count, rows, inner, columns = SHAPES[size]
    assert (rows * inner * columns >= LARGE) == (size == "large")
    torch.manual_seed(0)
    a, b = torch.randn(count, rows, inner, dtype=dtype), torch.randn(count, inner, columns, dtype=dtype)
    if transposed:  # as gradients have them: the same numbers in another order
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    expected = torch.einsum("nrk,nkc->nrc", a.double(), b.double())
    out = torch.full((count, rows, columns), torch.nan, dtype=dtype)
    total = torch.ones(count, rows, columns, dtype=dtype)
    multiply(a, b, out)
    add_product(total, a, b)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(total.double(), 1 + expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("processor : 0\nvendor_id\t: AuthenticAMD\n", True),
        ("processor : 0\nvendor_id\t: GenuineIntel\n", False),
        ("CPU implementer : 0x41\n", False),
        (None, False),
    ],
)
def test_onednn_is_for_makers_that_mkl_neglects(
    text: str | None, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(matrix_products, "CPU_INFO", path)
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    assert mkl_is_slow() == (slow and libraries)


def test_without_the_operation_mkl_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_products, "mkl_is_slow", lambda: True)

    class Nothing:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    monkeypatch.setattr(matrix_products.torch, "ops", Nothing())
    assert onednn_linear() is None
