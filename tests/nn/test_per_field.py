"""Fields that each have a filter of their own: the same convolution, in other shapes."""

import pytest
import torch
import torch.nn.functional as F

from revit.evaluation.complexity import measured_macs
from revit.exactness import Sampling
from revit.nn import GroupConv, per_field

FIELDS = (1, 2, 5, 8)
ORDERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("order", ORDERS)
def test_equals_a_convolution_of_groups_of_channels(order: int, fields: int) -> None:
    x = torch.randn(2, fields, order, 5, 6, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(fields * order, order, 3, 3, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(x.flatten(1, 2), bank, stride=2, padding=1, groups=fields).unflatten(1, (fields, order))
    found = per_field.convolve(x, bank, Sampling(3, 2, 1))
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(expected)
    of_expected, of_found = (torch.autograd.grad(out, (x, bank), grad) for out in (expected, found))
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-10)


EIGHTS = {1: 8, 2: 8, 3: 8, 4: 8, 5: 8, 6: 8, 8: 8, 10: 16, 12: 16, 16: 16, 20: 24, 24: 24}
WHERE = {1: (True, False), 2: (True, True), 3: (True, True), 4: (True, False), 6: (True, True), 8: (False, False)}
WHERE |= {12: (True, True), 16: (False, False)}  # elements: in training, in inference


@pytest.mark.parametrize(("order", "channels"), EIGHTS.items())
def test_channels_that_meet_are_a_multiple_of_eight(order: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    convolution = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, weight, *rest: seen.append(weight.shape[1]) or convolution(x, weight, *rest))
    per_field.convolve(torch.randn(1, 3, order, 4, 4), torch.randn(3 * order, order, 3, 3), Sampling(3, 1, 1))
    assert seen == [channels]


@pytest.mark.parametrize("group", ["z2", "z2m", "p3", "p4", "p6", "p8", "p12", "p4m"])
def test_layers_compute_the_same_whatever_pays(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GroupConv(group, 3, 3, 3, padding=1, groups=3)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, layer.group.order, 6, 5)
    found = []
    for answer in (True, False):
        monkeypatch.setattr(per_field, "pays", lambda *_, answer=answer: answer)
        found.append(layer(x))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_only_in_eager_float32_on_a_cpu() -> None:
    x, weight = torch.randn(1, 3, 6, 4, 4), torch.randn(3, 1, 6, 3, 3, requires_grad=True)
    assert per_field.pays(x, weight)
    assert not per_field.pays(x.double(), weight.double())
    assert not per_field.pays(torch.empty(1, 3, 6, 4, 4, device="meta"), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not per_field.pays(x, weight)


@pytest.mark.parametrize(("order", "pays"), WHERE.items())
def test_where_it_pays(order: int, pays: tuple[bool, bool]) -> None:
    x, weight = torch.randn(1, 2, order, 4, 4), torch.randn(2, 1, order, 3, 3, requires_grad=True)
    assert per_field.pays(x, weight) == pays[0]
    with torch.no_grad():
        assert per_field.pays(x, weight) == pays[1]


def test_zeros_are_not_counted_as_work() -> None:
    layer = GroupConv("p6", 3, 3, 3, padding=1, groups=3, bias=False)
    x = torch.randn(1, 3, 6, 5, 5)
    assert measured_macs(layer, x).convolution == 3 * 6 * 6 * 9 * 25
