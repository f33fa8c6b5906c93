"""The Fourier basis of a group: representations, blocks, and the same linear map as the dense one."""

import copy
import io

import pytest
import torch

from revit.actions import act_on_features
from revit.evaluation.complexity import measured_macs
from revit.groups import Group
from revit.nn import GroupLinear
from revit.nn.fourier import fourier_blocks, group_linear, multiply_adds

GROUPS = ["z2", "z2m", "p2", "p2m", "p3", "p3m", "p4", "p4m", "p5", "p5m", "p6m", "p8", "p8m", "p12", "p16"]


@pytest.mark.parametrize("name", GROUPS)
def test_blocks_are_irreducible_representations(name):
    """They multiply as the elements do, and their functions are an orthonormal basis: so none is missing or repeated."""
    group = Group.parse(name)
    blocks = fourier_blocks(group)
    for part in blocks:
        matrices = part.spectrum.permute(0, 3, 1, 2)  # [n, G, d, d]
        products = torch.einsum("ngab,nhbc->nghac", matrices, matrices)
        torch.testing.assert_close(products, matrices[:, group.product], rtol=0, atol=1e-12)
    functions = torch.cat([part.basis.flatten(0, 2) for part in blocks])
    torch.testing.assert_close(functions @ functions.T, torch.eye(group.order, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "units"), [("z2", 1), ("z2m", 2), ("p4", 6), ("p8", 14), ("p12", 22), ("p16", 30), ("p4m", 12), ("p8m", 28)]
)
def test_units_of_work(name, units):
    """6 instead of 16 for p4, 14 of 64 for p8, 12 of 64 for p4m, 28 of 256 for p8m."""
    order = Group.parse(name).order
    assert multiply_adds(Group.parse(name), 5, 7) == units * 5 * 7 + order**2 * (5 + 7)


@pytest.mark.parametrize("name", GROUPS)
def test_equals_the_sum_over_elements(name):
    group = Group.parse(name)
    x = torch.randn(2, 3, group.order, 2, 4, dtype=torch.float64)
    weight = torch.randn(5, 3, group.order, dtype=torch.float64)
    expected = torch.zeros(2, 5, group.order, 2, 4, dtype=torch.float64)
    for g in range(group.order):
        for h in range(group.order):
            k = group.product[group.inverse[g], h]
            expected[:, :, g] += torch.einsum("oi,bihw->bohw", weight[:, :, k], x[:, :, h])
    torch.testing.assert_close(group_linear(x, weight, group), expected, rtol=0, atol=1e-12)


def pair(group, bias=True):
    """The same layer twice, dense and by blocks."""
    dense = GroupLinear(group, 3, 4, bias=bias).double()
    fourier = GroupLinear(group, 3, 4, bias=bias, algorithm="fourier").double()
    fourier.load_state_dict(dense.state_dict())
    return dense, fourier


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", ["z2m", "p4", "p4m", "p8", "p8m"])
def test_the_layer_and_its_gradients_equal_the_dense_one(group, bias):
    x = torch.randn(2, 3, Group.parse(group).order, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for layer in pair(group, bias):
        out = layer(x)
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    for dense, fourier in zip(*results, strict=True):
        torch.testing.assert_close(fourier, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
def test_exact(group):
    layer = GroupLinear(group, 3, 4, algorithm="fourier").double()
    x = torch.randn(1, 3, Group.parse(group).order, 4, 5, dtype=torch.float64)
    for g in range(layer.group.order):
        turned = layer(act_on_features(x, group, g))
        torch.testing.assert_close(turned, act_on_features(layer(x), group, g), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", ["p4", "p4m", "p8"])
def test_cost_by_formula_is_the_cost_counted(group):
    layer = GroupLinear(group, 6, 5, algorithm="fourier")
    x = torch.randn(2, 6, layer.group.order, 4, 5)
    with torch.no_grad():
        counted = measured_macs(layer, x).total
    weights = sum(part.spectrum.numel() for part in fourier_blocks(layer.group)) * 5 * 6
    assert abs(counted - layer.multiply_adds(4, 5)) <= weights / 2 + 1  # of two images, which share the blocks


def test_it_compiles_exports_and_copies():
    _, layer = pair("p4m")
    x = torch.randn(2, 3, 8, 4, 4, dtype=torch.float64)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=1e-12)
    file = io.BytesIO()
    torch.export.save(program, file)
    assert file.getbuffer().nbytes > 0


def test_the_choice_is_shown_and_checked():
    assert "fourier" in repr(GroupLinear("p4", 2, 2, algorithm="fourier")) and "dense" in repr(GroupLinear("p4", 2, 2))
    with pytest.raises(ValueError, match="^unknown algorithm 'fast'; choose dense, fourier$"):
        GroupLinear("p4", 2, 2, algorithm="fast")
