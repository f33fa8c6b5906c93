"""Products of matrices are products, whichever library computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from revit.nn import GroupLinear, convolution, matrix_products
from revit.nn.matrix_products import LARGE, add_product, mkl_is_slow, multiply, multiply_positions, onednn_linear, products_pay

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


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_matrix_at_every_position(bias: bool) -> None:
    x, weight = torch.randn(3, 4, 5, 6, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    vector = torch.randn(7, dtype=torch.float64) if bias else None
    expected = F.conv2d(x, weight[..., None, None], vector)
    with FlopCounterMode(display=False) as counter:
        found = multiply_positions(x, weight, vector)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()} == {
        "aten.baddbmm": 2 * 3 * 7 * 4 * 30
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(6, 5), (1, 1)])  # of one position: weights are many beside the map
def test_layers_compute_the_same_whatever_pays(size: tuple[int, int], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GroupLinear("p4m", 3, 5, bias=bias, algorithm="dense").double()
    x = torch.randn(2, 3, 8, *size, dtype=torch.float64, requires_grad=True)
    grad, found = torch.randn(2, 5, 8, *size, dtype=torch.float64), []
    for answer in (True, False):
        monkeypatch.setattr(convolution, "products_pay", lambda *_, answer=answer: answer)
        out = layer(x)
        found.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


def test_products_pay_where_mkl_is_fast_and_maps_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 12, 7, 7), torch.randn(24, 12, 1, 1)
    monkeypatch.setattr(matrix_products, "mkl_is_slow", lambda: False)
    assert products_pay(x, weight)
    assert not products_pay(torch.randn(2, 12, 1, 1), weight)  # 288 weights beside 72 numbers
    assert not products_pay(x.bfloat16(), weight) and not products_pay(x.to("meta"), weight)
    with FlopCounterMode(display=False):
        assert not products_pay(x, weight)
    monkeypatch.setattr(matrix_products, "mkl_is_slow", lambda: True)
    assert not products_pay(x, weight)
