"""Attentive convolutions against loops over the equations of Romero et al., exactness, memory and cost."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.equivariance import equivariance_error
from revit.evaluation.complexity import count_macs, measured_macs
from revit.groups import Group
from revit.nn import GroupConv, GroupLinear, LiftingConv, attentive
from revit.nn.attentive import AttentiveConv, ChannelAttention, FeatureAttentiveConv, SpatialAttention


def lifting(group, **options):
    return AttentiveConv(LiftingConv(group, 4, 3, 3, padding=1), **{"hidden": 2, "kernel_size": 5, **options})


def inside(group, kernel_size=3, **options):
    return AttentiveConv(GroupConv(group, 4, 3, kernel_size), **{"hidden": 2, "kernel_size": 5, **options})


LAYERS = {
    "lifting": lifting,
    "lifting_of_attended": lambda g: FeatureAttentiveConv(LiftingConv(g, 4, 3, 3), hidden=4, dilation=2),
    "lifting_positions": lambda g: SpatialAttention(g, 5, lifting=True),
    "group": inside,
    "group_even": lambda g: inside(g, 4),
    "group_strided": lambda g: AttentiveConv(GroupConv(g, 4, 3, 4, stride=2, padding=1), hidden=3, kernel_size=3),
    "group_of_attended": lambda g: FeatureAttentiveConv(GroupConv(g, 4, 3, 3), hidden=2, kernel_size=5, dilation=2),
    "linear_of_attended": lambda g: FeatureAttentiveConv(GroupLinear(g, 4, 3), hidden=2, kernel_size=3),
    "fields": lambda g: ChannelAttention(g, 4, 2),
    "positions": lambda g: SpatialAttention(g, 7, dilation=3),
}


def build(layer, group):
    """In float64, with weights that make attention vary between 0 and 1."""
    module = LAYERS[layer](group).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def features(layer, group, size, batch=2):
    elements = () if layer.startswith("lifting") else (Group.parse(group).order,)
    return torch.randn(batch, 4, *elements, *size, dtype=torch.float64)


@pytest.mark.parametrize("layer", LAYERS)
def test_exact(layer, exact_group):
    module = build(layer, exact_group)
    for size in ((8, 8), (8, 12)):
        x = features(layer, exact_group, size)
        assert equivariance_error(module, x, exact_group, relative=True, reduction="max").max() <= 1e-12


@pytest.mark.parametrize("layer", LAYERS)
def test_p8_is_exact_for_quarter_turns(layer):
    errors = equivariance_error(build(layer, "p8"), features(layer, "p8", (8, 8)), "p8", relative=True, reduction="max")
    assert errors[::2].max() <= 1e-12
    assert layer == "fields" or errors[1::2].min() > 1e-3


def correlate(plane, kernel, padding=0, dilation=1):
    """Cross-correlation of one map with one filter, pixel by pixel, zero outside."""
    plane = F.pad(plane, (padding,) * 4)
    reach = dilation * (len(kernel) - 1) + 1
    rows, columns = (side - reach + 1 for side in plane.shape)
    out = torch.zeros(rows, columns, dtype=plane.dtype)
    for y in range(rows):
        for x in range(columns):
            out[y, x] = (plane[y : y + reach : dilation, x : x + reach : dilation] * kernel).sum()
    return out


def turn(kernel, g):
    return torch.rot90(kernel, g, (-2, -1))


def two_layers(first, second, seen):
    return sum(second @ (first @ s).relu() for s in seen).sigmoid()


@pytest.mark.parametrize("lifts", [False, True])
def test_attention_inside_against_the_equations(lifts):
    """p4, element by element: the filters and maps of output element g for input element h are those of g^-1 h, turned by g."""
    conv = LiftingConv("p4", 3, 2, 3, padding=1) if lifts else GroupConv("p4", 3, 2, 3)
    layer = AttentiveConv(conv, hidden=2, kernel_size=5).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 3, *(() if lifts else (4,)), 6, 5, dtype=torch.float64)
    # Weights with the relative element first, the same for all of them where an image is lifted.
    filters, reduce, expand, look = (
        bank.weight.detach().unsqueeze(0).expand(4, *bank.weight.shape) if lifts else bank.weight.detach().movedim(2, 0)
        for bank in (conv.filters, layer.reduce, layer.expand, layer.spatial)
    )
    reduce, expand = (
        reduce[..., 0, 0].unflatten(1, (2, 2)),
        expand[..., 0, 0].unflatten(1, (2, 3)),
    )  # [4, o, 2, 3], [4, o, 3, 2]
    out = layer(x)[0]
    expected = conv.bias.detach().view(2, 1, 1, 1).expand(out.shape).clone()
    for o in range(2):
        for g in range(4):
            for h in range(1 if lifts else 4):
                relative = (h - g) % 4
                maps = x[0] if lifts else x[0, :, h]
                y = [correlate(maps[i], turn(filters[relative][o, i], g), conv.sampling.padding) for i in range(3)]
                y = torch.stack(y)
                seen = (y.mean((1, 2)), y.amax((1, 2)))
                c = two_layers(reduce[relative][o], expand[relative][o], seen)
                attended = c.view(3, 1, 1) * y
                seen = (attended.mean(0), attended.amax(0))
                a = sum(correlate(s, turn(look[relative][o, k], g), padding=2) for k, s in enumerate(seen)).sigmoid()
                expected[o, g] += ((1 - a * c.view(3, 1, 1)) * y).sum(0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lifts", [False, True])
def test_attention_to_the_input_against_the_equations(lifts):
    """p4: both layers of the attention to fields sum over elements too; an image has the largest of four at each position."""
    conv = LiftingConv("p4", 3, 2, 3) if lifts else GroupConv("p4", 3, 2, 3)
    layer = FeatureAttentiveConv(conv, hidden=2, kernel_size=3, dilation=2).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 3, *(() if lifts else (4,)), 6, 5, dtype=torch.float64)
    order = 1 if lifts else 4
    maps = x[0].view(3, order, 6, 5)

    def matrix(linear):  # rows (o, g), columns (i, h): weight[o, i, g^-1 h]
        weight = linear.weight.detach()[..., 0, 0]
        blocks = [[[[w[(h - g) % order] for h in range(order)] for w in row] for g in range(order)] for row in weight]
        return torch.tensor(blocks, dtype=torch.float64).flatten(2).flatten(0, 1)

    seen = [s.flatten() for s in (maps.mean((-2, -1)), maps.amax((-2, -1)))]
    c = two_layers(matrix(layer.channel.fc1), matrix(layer.channel.fc2), seen).view(3, order, 1, 1)
    seen = torch.stack(((c * maps).mean(0), (c * maps).amax(0)))  # [2, order, 6, 5]
    look = layer.spatial.conv.weight.detach()[0]
    options = {"padding": 2, "dilation": 2}
    if lifts:
        a = torch.stack([sum(correlate(seen[k, 0], turn(look[k], g), **options) for k in range(2)) for g in range(4)])
        a = a.amax(0, keepdim=True).sigmoid()
    else:
        a = [
            sum(correlate(seen[k, h], turn(look[k, (h - g) % 4], g), **options) for k in range(2) for h in range(4))
            for g in range(4)
        ]
        a = torch.stack(a).sigmoid()
    torch.testing.assert_close(layer(x), conv(((1 - a * c) * maps).view(x.shape)), rtol=0, atol=1e-10)


def test_weights_of_zero_take_a_quarter_away():
    """Both attentions are then one half, and 1 - 1/4 of the plain convolution is left, bias aside."""
    for layer in (inside("p4m"), FeatureAttentiveConv(GroupConv("p4m", 4, 3, 3, bias=False), hidden=2)):
        for name, parameter in layer.named_parameters():
            if not name.startswith("conv."):
                nn.init.zeros_(parameter)
        x = torch.randn(2, 4, 8, 7, 7)
        torch.testing.assert_close(layer(x), 0.75 * layer.conv(x))


def gradients(layer, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("layer", ["lifting", "group"])
def test_a_few_fields_at_a_time_give_the_same(layer, monkeypatch):
    module, x = build(layer, "p4"), features(layer, "p4", (7, 6))
    whole = gradients(module, x)
    for at_once in (1, 2 * 2 * 4 * 4 * 4 * 5 * 4):  # one field, two fields of three
        monkeypatch.setattr(attentive, "RESPONSES_AT_ONCE", at_once)
        for part, expected in zip(gradients(module, x), whole, strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(module(x), whole[0], rtol=0, atol=1e-12)


def test_responses_are_not_kept(monkeypatch):
    """What autograd stores from the forward pass is less than one output field's responses, and far less than all."""
    module, x = inside("p4", kernel_size=3), torch.randn(8, 4, 4, 12, 12)
    responses = 8 * 4 * 4 * 4 * 10 * 10

    def kept():
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.update({t.data_ptr(): t.numel()}) or t, lambda t: t):
            module(x).sum()
        return sum(sizes.values())

    assert kept() > 3 * responses
    monkeypatch.setattr(attentive, "RESPONSES_AT_ONCE", responses)
    assert kept() < responses


@pytest.mark.parametrize("layer", ["lifting", "group", "lifting_of_attended", "group_of_attended"])
def test_gradients(layer, monkeypatch):
    monkeypatch.setattr(attentive, "RESPONSES_AT_ONCE", 1)
    module = build(layer, "p2")
    x = features(layer, "p2", (5, 5), batch=1).requires_grad_()
    assert torch.autograd.gradcheck(module, x, fast_mode=True)
    module(x).square().sum().backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@pytest.mark.parametrize("group", ["z2", "p4", "p4m", "p8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_formula_is_what_torch_counts(layer, group):
    class Model(nn.Module):
        in_chans = 4

        def __init__(self):
            super().__init__()
            self.lift = nn.Identity() if layer.startswith("lifting") else LiftingConv(group, 4, 4, 1)
            self.layer = LAYERS[layer](group)

        def forward(self, x):
            return self.layer(self.lift(x))

    model = Model()
    found = count_macs(model, (8, 10))
    assert found.total == measured_macs(model, torch.randn(3, 4, 8, 10)).total and found.attention == 0
    if layer == "group":
        order, pixels = Group.parse(group).order, 6 * 8
        responses, matrices, looks = 4 * 3 * 9 * pixels, 2 * 2 * 3 * 4 * 2, 3 * 2 * 25 * pixels
        assert found.layers["layer"] == order**2 * (responses + matrices + looks)


def test_the_maximum_has_the_gradient_of_amax():
    """Equal maxima share it, so that turned features have turned gradients."""
    x = torch.randn(3, 4, 5, 6).round().requires_grad_()
    for dim in ((1,), (-2, -1)):
        expected, weights = x.amax(dim), torch.randn(x.amax(dim).shape)
        assert torch.equal(attentive.maximum(x, *dim), expected)
        (gradient,) = torch.autograd.grad(attentive.maximum(x, *dim), x, weights)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, x, weights)[0])
        with torch.no_grad():
            assert torch.equal(attentive.maximum(x, *dim), expected)


def test_no_hidden_field_starts_dead():
    """Without biases, a hidden field of negative weights would be 0 for all positive features, and learn nothing for ever."""
    torch.testing.assert_close(ChannelAttention("p4m", 20, 2).fc1.weight.sum(dim=(1, 2, 3, 4)), torch.ones(2))
    x = torch.rand(4, 20, 8, 6, 6)
    for _ in range(20):
        layer = ChannelAttention("p4m", 20, 2)
        layer(x).sum().backward()
        assert layer.fc1.weight.grad.abs().amax(dim=(1, 2, 3, 4)).min() > 0


def test_layers_say_what_they_map():
    assert "4 -> 3 fields" in repr(inside("p4")) and "2 hidden, attention to 5 x 5 positions" in repr(inside("p4"))
    assert inside("p4").output_size(9, 8) == (7, 6) and LAYERS["linear_of_attended"]("p4").output_size(9, 8) == (9, 8)
    assert LAYERS["group_of_attended"]("p4").output_size(9, 8) == (7, 6)
    for layer in (inside("p4"), LAYERS["group_of_attended"]("p4")):
        assert layer.weight is layer.conv.weight and (layer.in_channels, layer.out_channels) == (4, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: inside("p4", hidden=0), "hidden must be a whole number >= 1, got 0"),
        (lambda: ChannelAttention("p4", 4, 1.5), "hidden must be a whole number >= 1, got 1.5"),
        (lambda: inside("p4", kernel_size=3, filters="round"), "unknown filters 'round'"),
        (lambda: SpatialAttention("p4", 4), "the kernel of an attention to positions must be odd to keep the size, got 4"),
        (lambda: lifting("p4", kernel_size=2), "the kernel of an attention to positions must be odd to keep the size, got 2"),
        (
            lambda: AttentiveConv(GroupConv("p4", 4, 4, 3, groups=2), hidden=2),
            "attention needs a convolution of all input fields, got groups=2",
        ),
        (lambda: lifting("p4")(torch.zeros(1, 3, 8, 8)), "expected images [B, 4, H, W], got shape [1, 3, 8, 8]"),
        (
            lambda: inside("p4")(torch.zeros(1, 4, 8, 8, 8)),
            "expected features [B, 4, 4, H, W] on p4, got shape [1, 4, 8, 8, 8]",
        ),
        (lambda: inside("p4")(torch.zeros(1, 4, 4, 2, 8)), "size 2 is below the minimum 3"),
    ],
)
def test_wrong_uses_are_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
