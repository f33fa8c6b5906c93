import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from revit.actions import act_on_features, act_on_plane
from revit.equivariance import equivariance_error
from revit.exactness import EquivarianceError, Sampling
from revit.groups import Group
from revit.nn import GroupConv, GroupLinear, LiftingConv
from revit.nn.convolution import Pointwise
from revit.nn.filter_bank import orthogonal_fields
from tests.conftest import EXACT_GROUPS


def test_nothing_is_padded_unless_asked_for():
    x = torch.randn(1, 2, 6, 7)
    lifted = LiftingConv("p4", 2, 3, 3)(x)
    assert lifted.shape == (1, 3, 4, 4, 5) and GroupConv("p4", 3, 2, 3)(lifted).shape == (1, 2, 4, 2, 3)


def loop_lifting(x, weight, group, stride=1, padding=0):
    """Eq. 7 as a loop: the image correlated with each turned filter."""
    maps = [F.conv2d(x, act_on_plane(weight, group, g), stride=stride, padding=padding) for g in range(group.order)]
    return torch.stack(maps, dim=2)


def loop_group_conv(x, weight, group, stride=1, padding=0):
    """out[o, g] = sum_{i, h} x[i, h] * T_g W[o, i, g^-1 h], one pair of elements at a time."""
    out = []
    for g in range(group.order):
        total = 0
        for h in range(group.order):
            relative = int(group.product[group.inverse[g], h])
            filters = act_on_plane(weight[:, :, relative], group, g)
            total = total + F.conv2d(x[:, :, h], filters, stride=stride, padding=padding)
        out.append(total)
    return torch.stack(out, dim=2)


@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding", "size"), [(3, 1, 1, (5, 6)), (4, 2, 1, (8, 6)), (5, 1, 2, (7, 7))]
)
def test_gconv_vs_loop(exact_group, kernel_size, stride, padding, size):
    group = Group.parse(exact_group)
    options = {"stride": stride, "padding": padding, "bias": False}
    lift = LiftingConv(group, 3, 4, kernel_size, **options).double()
    conv = GroupConv(group, 3, 4, kernel_size, **options).double()
    image = torch.randn(2, 3, *size, dtype=torch.float64)
    features = torch.randn(2, 3, group.order, *size, dtype=torch.float64)
    expected = loop_lifting(image, lift.weight, group, stride, padding)
    torch.testing.assert_close(lift(image), expected, rtol=0, atol=1e-12)
    expected = loop_group_conv(features, conv.weight, group, stride, padding)
    torch.testing.assert_close(conv(features), expected, rtol=0, atol=1e-12)


def test_trivial_group_is_an_ordinary_convolution():
    conv = GroupConv("z2", 3, 4, 3, stride=2, padding=1)
    x = torch.randn(2, 3, 1, 8, 9)
    expected = F.conv2d(x[:, :, 0], conv.weight[:, :, 0], conv.bias, stride=2, padding=1)
    assert torch.equal(conv(x)[:, :, 0], expected)


def test_group_linear_is_the_group_matrix():
    """For a cyclic group the matrix between two fields is circulant: M[g, h] = w[h - g]."""
    layer = GroupLinear("p4", 1, 1, bias=False).double()
    w = layer.weight.flatten()
    matrix = torch.stack([torch.stack([w[(h - g) % 4] for h in range(4)]) for g in range(4)])
    x = torch.randn(1, 1, 4, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0, 0], torch.einsum("gh,hyx->gyx", matrix, x[0, 0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["p4m", "p8", "p12", "p6m"])
def test_group_linear_is_exact_for_every_group(name):
    """Without space, turning only permutes the elements."""
    group, layer = Group.parse(name), GroupLinear(name, 3, 5).double()
    x = torch.randn(2, 3, group.order, 4, 4, dtype=torch.float64)
    for u in range(group.order):
        permutation = group.product[group.inverse[u]]
        torch.testing.assert_close(layer(x[:, :, permutation]), layer(x)[:, :, permutation], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("small", "large", "filters"), [("z2m", "p4m", "free"), ("p4", "p4m", "free"), ("p4", "p8", "rbf")])
def test_restriction_to_a_subgroup(small, large, filters):
    """The output of the larger group at the subgroup's elements is the subgroup's own output."""
    big, sub = Group.parse(large), Group.parse(small)
    where = big.elements_of(sub)
    lift = LiftingConv(big, 2, 3, 5, padding=2, filters=filters).double()
    small_lift = LiftingConv(sub, 2, 3, 5, padding=2, filters=filters).double()
    small_lift.load_state_dict(lift.state_dict())
    x = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(lift(x)[:, :, where], small_lift(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "kernel_size", "height", "width"),
    [(g, k, h, w) for g in ("z2m", "p4", "p4m") for k, (h, w) in ((3, (8, 8)), (4, (8, 6)), (5, (9, 7)))],
)
def test_dyadic_exact(name, kernel_size, height, width):
    """Whole-number inputs and dyadic weights make every partial sum exact in float32: turning must commute to the bit."""
    group = Group.parse(name)
    layers = torch.nn.Sequential(
        LiftingConv(group, 2, 3, kernel_size, padding=1, bias=False),
        torch.nn.ReLU(),
        GroupConv(group, 3, 2, kernel_size, padding=1, bias=False),
    )
    with torch.no_grad():
        for layer in (layers[0], layers[2]):
            layer.weight.copy_(torch.randint(-8, 9, layer.weight.shape) / 16)
    x = torch.randint(-4, 5, (2, 2, height, width)).float()
    upright = layers(x)
    assert upright.abs().max() > 1
    pooled = upright.amax(dim=2)
    for g in range(group.order):
        turned = layers(act_on_plane(x, group, g))
        assert torch.equal(turned, act_on_features(upright, group, g))
        assert torch.equal(turned.amax(dim=2), act_on_plane(pooled, group, g))


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from(EXACT_GROUPS),
    size=st.tuples(st.integers(4, 11), st.integers(4, 11)),
    kernel_size=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    filters=st.sampled_from(["free", "rbf", "steerable"]),
)
def test_layers_are_exact_or_refuse(group, size, kernel_size, stride, padding, dilation, filters):
    """For any shape: either the layer raises and names sizes, or its float64 error is rounding."""
    if min(size) + 2 * padding < dilation * (kernel_size - 1) + 1:
        return
    options = {"stride": stride, "padding": padding, "dilation": dilation, "filters": filters}
    order = Group.parse(group).order
    for layer, shape in (
        (LiftingConv(group, 2, 2, kernel_size, **options), (1, 2, *size)),
        (GroupConv(group, 2, 4, kernel_size, groups=2, **options), (1, 2, order, *size)),
    ):
        x = torch.randn(shape, dtype=torch.float64)
        sampling = Sampling(kernel_size, stride, padding, dilation)
        axes = {"z2": (), "z2m": size[1:]}.get(group, size)
        if any(sampling.leftover(s) for s in axes):
            with pytest.raises(EquivarianceError, match="nearest exact sizes"):
                layer.double()(x)
        else:
            error = equivariance_error(layer.double(), x, group, relative=True, reduction="max")
            assert error.max() <= 1e-12


@pytest.mark.parametrize("layer", ["lift", "group", "linear"])
def test_gradients_of_an_orbit_are_the_same(exact_group, layer):
    """dL/dW of a loss summed over the orbit is the same for x and for T_u x."""
    group = Group.parse(exact_group)
    module, channels = {
        "lift": (LiftingConv(group, 2, 3, 3, padding=1), ()),
        "group": (GroupConv(group, 2, 3, 3, padding=1), (group.order,)),
        "linear": (GroupLinear(group, 2, 3), (group.order,)),
    }[layer]
    module = module.double()
    x = torch.randn(1, 2, *channels, 5, 5, dtype=torch.float64)
    act = act_on_features if channels else act_on_plane

    def gradient(x):
        loss = sum(module(act(x, group, g)).sin().square().sum() for g in range(group.order))
        return torch.autograd.grad(loss, module.weight)[0]

    for u in range(group.order):
        torch.testing.assert_close(gradient(act(x, group, u)), gradient(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("filters", ["free", "rbf", "steerable"])
def test_gradcheck(filters):
    lift = LiftingConv("p4m", 1, 2, 3, padding=1, filters=filters).double()
    conv = GroupConv("p4", 2, 2, 3, padding=1, filters=filters).double()

    def run(module):
        def f(x, weight, bias):
            return torch.func.functional_call(module, {"filters.weight": weight, "bias": bias}, (x,))

        return f

    image = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    features = torch.randn(1, 2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run(lift), (image, lift.weight, lift.bias))
    assert torch.autograd.gradcheck(run(conv), (features, conv.weight, conv.bias))


def count_builds(layer, monkeypatch):
    builds, build = [], layer.filters._build
    monkeypatch.setattr(layer.filters, "_build", lambda: (builds.append(1), build())[1])
    return builds


def test_the_bank_is_built_once_per_step_and_once_in_eval(monkeypatch):
    conv = GroupConv("p4", 2, 2, 3, padding=1)
    builds = count_builds(conv, monkeypatch)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    x = torch.randn(1, 2, 4, 5, 5)
    for _ in range(3):
        optimizer.zero_grad()
        conv(x).sum().backward()
        optimizer.step()
    assert len(builds) == 3
    conv.eval()
    with torch.no_grad():
        outputs = [conv(x) for _ in range(3)]
    assert len(builds) == 4
    assert all(torch.equal(outputs[0], out) for out in outputs)


def test_the_cached_bank_is_never_stale():
    conv = GroupConv("p4", 2, 2, 3, padding=1).eval()
    x = torch.randn(1, 2, 4, 5, 5)

    def fresh():
        return F.conv2d(x.flatten(1, 2), conv.filters._build(), conv.bias.repeat_interleave(4), padding=1).unflatten(1, (2, 4))

    changes = [
        lambda: conv.weight.mul_(2),
        lambda: conv.weight.data.mul_(2),  # what many moving averages do; no version counter sees it
        lambda: conv.load_state_dict(GroupConv("p4", 2, 2, 3).state_dict()),
        lambda: setattr(conv.filters.weight, "data", torch.randn_like(conv.weight)),
        lambda: torch.optim.SGD(conv.parameters(), lr=1.0).step(),
    ]
    for change in changes:
        conv.weight.grad = torch.ones_like(conv.weight)
        with torch.no_grad():
            conv(x)
            change()
            assert torch.equal(conv(x), fresh())
    assert conv.double()(x.double()).dtype == torch.float64
    with torch.inference_mode():
        conv(x.double())
    assert conv(x.double()).requires_grad  # gradients are wanted: not the cached bank


def test_float64_evaluates_the_basis_again():
    """A float32 basis stored as float64 would carry an error of 1e-8 along."""
    layer = LiftingConv("p8", 1, 2, 5, filters="steerable")
    weight = layer.weight.detach().double()
    converted = layer.double()
    fresh = LiftingConv("p8", 1, 2, 5, filters="steerable").double()
    with torch.no_grad():
        fresh.weight.copy_(weight)
    assert torch.equal(converted.filters.basis, fresh.filters.basis)
    error = equivariance_error(converted, torch.randn(1, 1, 9, 9, dtype=torch.float64), "p8", relative=True)
    assert error[Group.parse("p8").elements_of("p4")].max() < 1e-14


def test_initial_weights_keep_the_variance():
    for filters, kernel_size in itertools.product(("free", "rbf", "steerable"), (3, 5)):
        layer = GroupConv("p4", 16, 64, kernel_size, filters=filters, bias=False)
        out = layer(torch.randn(4, 16, 4, 16, 16))
        assert 0.8 < out.std() < 1.25, (filters, kernel_size)


@pytest.mark.parametrize("name", ["z2", "z2m", "p4", "p4m", "p8", "p6m"])
@pytest.mark.parametrize("fields", [(4, 4), (6, 3), (3, 6)])
def test_orthogonal_fields(name, fields):
    group = Group.parse(name)
    layer = GroupLinear(group, fields[1], fields[0]).double()
    with torch.no_grad():
        layer.weight.copy_(orthogonal_fields(group, torch.Size((*fields, group.order)))[..., None, None])
    matrix = layer.filters().flatten(1)
    gram = matrix @ matrix.T if fields[0] <= fields[1] else matrix.T @ matrix
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-9)


def test_delta_orthogonal_puts_all_energy_on_the_centre():
    for filters in ("free", "steerable"):
        conv = GroupConv("p4", 3, 6, 5, padding=2, bias=False, filters=filters)
        conv.filters.reset_delta_orthogonal(parts=2)
        bank = conv.filters().detach()
        energy = bank.square().sum(dim=(0, 1))
        assert energy[2, 2] == pytest.approx(energy.sum().item(), rel=1e-5)
        for part in bank[:, :, 2, 2].chunk(2):
            torch.testing.assert_close(part @ part.T, torch.eye(12), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GroupConv("p4", 3, 4, 3, groups=2), r"groups=2 must divide the fields in \(3\) and out \(4\)"),
        (lambda: GroupConv("p4", 0, 4, 3), "in_channels must be a whole number >= 1, got 0"),
        (lambda: LiftingConv("p4", 1, 2.5, 3), "out_channels must be a whole number >= 1, got 2.5"),
        (lambda: LiftingConv("p5x", 1, 2, 3), "unknown group 'p5x'"),
        (lambda: GroupConv("p8", 2, 2, 3, filters="free"), "use filters='rbf'"),
        (lambda: GroupConv("p4", 2, 2, 3)(torch.zeros(1, 2, 8, 5, 5)), r"\[B, 2, 4, H, W\] on p4, got shape \[1, 2, 8, 5, 5\]"),
        (lambda: LiftingConv("p4", 3, 2, 3)(torch.zeros(1, 1, 5, 5)), r"images \[B, 3, H, W\], got shape \[1, 1, 5, 5\]"),
        (lambda: LiftingConv("p4", 1, 2, 7)(torch.zeros(1, 1, 5, 5)), "size 5 is below the minimum 7"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_layers_print_what_they_map():
    assert "p4m, 3 -> 8 fields" in repr(LiftingConv("p4m", 3, 8, 3)) and "exact" in repr(LiftingConv("p4m", 3, 8, 3))
    text = repr(GroupConv("p8", 4, 8, 5, padding=2, groups=4))
    assert "p8, 4 -> 8 fields" in text and "groups=4" in text and "multiples of 90°" in text and "rbf" in text
    assert "p4, 2 -> 6 fields" in repr(GroupLinear("p4", 2, 6))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (LiftingConv("p4", 2, 3, 3, padding=1), (1, 2, 5, 7)),
        (GroupConv("p4", 4, 6, 3, padding=1, groups=2, algorithm="dense"), (1, 4, 4, 5, 7)),
        (GroupLinear("p4m", 3, 5, algorithm="dense"), (1, 3, 8, 5, 7)),
    ],
)
def test_products_are_those_that_torch_counts(layer, shape):
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(shape))
    assert 2 * layer.multiply_adds(5, 7) == counter.get_total_flops()


@pytest.mark.parametrize("make", [lambda **o: LiftingConv("p4", 1, 2, 3, **o), lambda **o: GroupConv("p4", 1, 2, 3, **o),
                                  lambda **o: GroupLinear("p4", 1, 2, **o), lambda **o: Pointwise(1, 2, **o)])  # fmt: skip
def test_a_layer_has_a_bias_unless_told_otherwise(make):
    assert make().bias.shape == (2,) and make(bias=False).bias is None


@pytest.mark.parametrize("bias", [True, False])
def test_pointwise_is_one_matrix_everywhere(bias, monkeypatch):
    layer, x = Pointwise(3, 2, bias=bias).double(), torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    expected = torch.einsum("oi,bighw->boghw", layer.weight.flatten(1), x)
    if bias:
        torch.nn.init.normal_(layer.bias)
        expected = expected + layer.bias[:, None, None, None]
    assert (layer(x) - expected).abs().max() < 1e-12
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert (layer(x) - expected).abs().max() < 1e-12


def test_linear_chooses_by_the_positions_of_its_map():
    layer = GroupLinear("p16", 48, 96).requires_grad_(False)
    least = layer.algorithm.in_inference
    assert least > 4
    for height, width in ((1, least), (least, 1), (1, least - 1), (2, least // 2 + 1), (2, least // 2 - 1)):
        weights = layer.expand(torch.zeros(1, 48, 16, height, width))
        assert isinstance(weights, list) is (height * width >= least)
