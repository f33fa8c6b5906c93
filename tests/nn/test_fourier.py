"""The Fourier basis of a group: representations, blocks, and the same linear map as the dense one."""

import copy
import io

import pytest
import torch

from revit.actions import act_on_features
from revit.evaluation.complexity import measured_macs
from revit.groups import Group
from revit.nn import GroupConv, GroupLinear
from revit.nn.fourier import group_linear
from revit.nn.fourier_basis import fourier_blocks, multiply_adds

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
    dense = GroupLinear(group, 3, 4, bias=bias, algorithm="dense").double()
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


CONVOLUTIONS = [
    ("z2m", 3, "free", {"padding": 1}),
    ("p4", 5, "steerable", {"padding": 2}),
    ("p4", 3, "rbf", {}),
    ("p4m", 3, "free", {"padding": 1}),
    ("p4m", 4, "steerable", {"stride": 2, "padding": 1}),
    ("p8", 5, "steerable", {"padding": 2}),
    ("p8m", 3, "steerable", {"padding": 2, "dilation": 2}),
    ("p12", 3, "steerable", {}),
    ("p16", 5, "steerable", {}),
]


@pytest.mark.parametrize(("group", "kernel_size", "filters", "options"), CONVOLUTIONS)
def test_group_convolution_and_its_gradients_equal_the_dense_one(group, kernel_size, filters, options):
    layers = [
        GroupConv(group, 2, 3, kernel_size, filters=filters, algorithm=name, **options).double()
        for name in ("dense", "fourier")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 2, Group.parse(group).order, 8, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for layer in layers:
        out = layer(x)
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    for dense, fourier in zip(*results, strict=True):
        torch.testing.assert_close(fourier, dense, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("group", "units"), [("p4", 66), ("p8", 154), ("p16", 330), ("p4m", 132), ("p8m", 308)])
def test_units_of_a_steerable_convolution(group, units):
    """For a pair of fields at 5 x 5, beside what is done for a field alone: 66 instead of 400 for p4, 330 of 6,400 for p16."""
    few, more = (GroupConv(group, 3, out, 5, filters="steerable", algorithm="fourier") for out in (4, 5))
    order = few.group.order
    assert (more.multiply_adds(1, 1) - few.multiply_adds(1, 1) - order**2) == 3 * units
    dense = GroupConv(group, 3, 4, 5, filters="steerable", algorithm="dense")
    assert dense.multiply_adds(1, 1) == 3 * 4 * 25 * order**2


def polar(matrices):
    """The nearest (semi-)orthogonal matrix of each."""
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    return left @ right


@pytest.mark.parametrize(("group", "kernel_size"), [("z2m", 3), ("p4", 1), ("p4", 4), ("p4m", 3), ("p6", 1), ("p8m", 1)])
@pytest.mark.parametrize("fields", [(5, 3), (3, 5)])
def test_what_is_done_to_all_blocks_is_done_to_the_bank(group, kernel_size, fields):
    """The nearest orthogonal matrix to a bank is a bank again, and its blocks are those of the blocks."""
    filters = GroupConv(group, *fields, kernel_size=kernel_size, bias=False, filters="free").double().filters
    weight = filters.weight.detach().clone()
    torch.testing.assert_close(filters.change_blocks(weight, lambda blocks: blocks), weight, rtol=0, atol=1e-12)
    expected = polar(filters().detach().flatten(1))
    with torch.no_grad():
        filters.weight.copy_(filters.change_blocks(weight, polar))
    torch.testing.assert_close(filters().flatten(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", ["p4m", "p8", "p8m"])
def test_blocks_of_steerable_filters_can_be_changed_and_are_what_layers_compute_with(group):
    filters = GroupConv(group, 3, 5, kernel_size=5, filters="steerable").double().filters
    weight, before = filters.weight.detach().clone(), [block.detach() for block in filters.blocks()]
    assert filters.change_blocks(weight, lambda blocks: blocks) is not None
    with torch.no_grad():
        filters.weight.copy_(filters.change_blocks(weight, polar))
    for found, block in zip(filters.blocks(), before, strict=True):
        torch.testing.assert_close(found, polar(block), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", ["p4", "p8m"])
def test_cost_of_a_convolution_by_formula_is_the_cost_counted(group):
    layer = GroupConv(group, 4, 3, 5, padding=2, filters="steerable", algorithm="fourier")
    with torch.no_grad():
        one, two = (measured_macs(layer, torch.randn(batch, 4, layer.group.order, 6, 5)).total * batch for batch in (1, 2))
    assert two - one == layer.multiply_adds(6, 5)  # without the weights, which images share


@pytest.mark.parametrize(("group", "filters"), [("p8", "rbf"), ("p8", "interpolate"), ("p12", "rbf")])
def test_filters_that_do_not_turn_into_each_other_are_refused(group, filters):
    message = f"^{filters} filters do not turn into each other under {group}: choose dense, or steerable filters$"
    with pytest.raises(ValueError, match=message):
        GroupConv(group, 2, 2, 3, filters=filters, algorithm="fourier")
    with pytest.raises(ValueError, match="^the algorithm fourier mixes all fields, got groups=2; choose dense$"):
        GroupConv("p4", 2, 2, 3, groups=2, algorithm="fourier")


def test_the_choice_is_shown_and_checked():
    assert "fourier" in repr(GroupLinear("p4", 2, 2, algorithm="fourier"))
    assert "dense (auto)" in repr(GroupLinear("p4", 2, 2))
    with pytest.raises(ValueError, match="^unknown algorithm 'fast'; choose auto, dense, fourier$"):
        GroupLinear("p4", 2, 2, algorithm="fast")
