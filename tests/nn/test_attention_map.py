"""Attention maps from their definition: Eq. 10 in loops, the rule by which they turn, and the output that they make."""

import itertools
import math

import pytest
import torch

from revit.actions import act_on_features, act_on_plane
from revit.groups import Group
from revit.nn import GroupConvAttention
from revit.nn.attention import ATTENTIONS, NEIGHBOURHOODS
from tests.nn.test_attention import neighbours


def make_layer(group="p4m", **options):
    return GroupConvAttention(group, 4, 2, **{"window_size": 3, **options}).double()


def make_features(layer, *size, batch=1):
    return torch.randn(batch, layer.channels, layer.group.order, *size, dtype=torch.float64)


def loop_map(layer, features, x, near):
    """Eq. 10 for one pixel x, number by number: softmax over its keys, one head and one query element at a time."""
    q, k, _ = (value[0] for value in layer.qkv(features))
    order, dim = layer.group.order, layer.channels // layer.num_heads
    out = torch.zeros(features.shape[-2:], dtype=torch.float64)
    for n, g in itertools.product(range(layer.num_heads), range(order)):
        head = slice(n * dim, (n + 1) * dim)
        scores = {}
        for y in near:
            for h in range(order):
                if layer.attention == "joint":
                    scores[y, h] = float(q[head, g, x[0], x[1]] @ k[head, h, y[0], y[1]]) / math.sqrt(dim)
                elif layer.attention == "per_element" and h == g:
                    scores[y, h] = float(q[head, g, x[0], x[1]] @ k[head, g, y[0], y[1]]) / math.sqrt(dim)
            if layer.attention == "spatial":
                scores[y, None] = float((q[head, :, x[0], x[1]] * k[head, :, y[0], y[1]]).sum()) / math.sqrt(dim * order)
        total = sum(math.exp(score) for score in scores.values())
        for (y, _), score in scores.items():
            out[y] += math.exp(score) / total / order / layer.num_heads
    return out


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize("neighbourhood", NEIGHBOURHOODS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_map_vs_loop(attention, neighbourhood, group):
    layer = make_layer(group, attention=attention, neighbourhood=neighbourhood)
    size = (4, 5)  # windows of 3 need padding here, on both axes
    features = make_features(layer, *size)
    with torch.no_grad():
        for x in ((0, 0), (2, 3)):
            near = neighbours(x, size, neighbourhood, 3)
            found = layer.attention_map(features, *x)
            assert found.shape == (1, 4, 5)
            torch.testing.assert_close(found[0], loop_map(layer, features, x, near), rtol=0, atol=1e-12)
            outside = set(itertools.product(range(4), range(5))) - set(near)
            assert all(found[0][y] == 0 for y in outside)


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize(
    "options", [{"neighbourhood": n} for n in NEIGHBOURHOODS] + [{"shifted": True}, {"kv_reduction": 4}], ids=str
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_map_turns_with_the_input(attention, options, group):
    """map(T_g F, g x) = T_g map(F, x) on a map that is not square, in a corner and inside."""
    if "shifted" in options:
        options = {"neighbourhood": "window", "window_size": 4, "shifted": True}
    layer, group = make_layer(group, attention=attention, **options), Group.parse(group)
    features = make_features(layer, 6, 4, batch=2)
    places = torch.arange(24.0).view(6, 4)
    with torch.no_grad():
        for g in range(group.order):
            turned = act_on_features(features, group, g)
            for row, column in ((0, 0), (4, 2)):
                (there,) = (act_on_plane(places, group, g) == places[row, column]).nonzero().tolist()
                expected = act_on_plane(layer.attention_map(features, row, column), group, g)
                torch.testing.assert_close(layer.attention_map(turned, *there), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"neighbourhood": n} for n in NEIGHBOURHOODS] + [{"kv_reduction": 3}], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_map_is_what_forward_uses(attention, options):
    """With one head and values that are the same in all elements, the output is the sum of the values by the map."""
    layer = make_layer("p4", attention=attention, **options)
    layer.num_heads = 1
    features, values = make_features(layer, 5, 7), torch.randn(1, 1, 1, 5, 7, dtype=torch.float64)
    project = layer.qkv.forward
    layer.qkv.forward = lambda x: (*project(x)[:2], values.expand_as(x).contiguous())
    layer.proj = torch.nn.Identity()
    with torch.no_grad():
        out = layer(features)[0].mean((0, 1))  # over fields and elements
        for row, column in ((0, 6), (2, 3), (4, 0)):
            found = layer.attention_map(features, row, column)
            assert float(found.sum()) == pytest.approx(1, abs=1e-12)
            assert float((found * values[:, 0, 0]).sum()) == pytest.approx(float(out[row, column]), abs=1e-12)


def test_map_has_no_dropout():
    layer = make_layer(attn_dropout=0.5).train()
    features = make_features(layer, 4, 4)
    assert torch.equal(layer.attention_map(features, 1, 2), layer.attention_map(features, 1, 2))


@pytest.mark.parametrize("place", [(4, 0), (0, 5), (-1, 0)])
def test_a_pixel_outside_is_named(place):
    layer = make_layer()
    with pytest.raises(ValueError) as error:
        layer.attention_map(make_features(layer, 4, 5), *place)
    assert str(error.value) == f"no pixel ({place[0]}, {place[1]}) in a map of 4 x 5; rows and columns count from 0"
