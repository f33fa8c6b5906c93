import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from revit.actions import act_on_features
from revit.equivariance import equivariance_error
from revit.evaluation.complexity import measured_macs
from revit.exactness import EquivarianceError, tile_axis
from revit.groups import Group
from revit.nn import ConvProjection, GroupConvAttention
from revit.nn import attention as attention_module
from revit.nn.attention import ATTENTIONS, NEIGHBOURHOODS, attend_map, attend_neighbours, attend_windows
from tests.conftest import EXACT_GROUPS


def neighbours(x, size, neighbourhood, window):
    """N(x) from its definition: all positions, those in the same window of a symmetric tiling, or those around x."""
    height, width = size
    everywhere = list(itertools.product(range(height), range(width)))
    if neighbourhood == "global":
        return everywhere
    if neighbourhood == "local":
        return [y for y in everywhere if max(abs(y[0] - x[0]), abs(y[1] - x[1])) <= window // 2]

    def tile(position, length):
        if length <= window:
            return 0
        padded = next(n for n in range(length, length + 2 * window) if n % window == 0 and (n - length) % 2 == 0)
        return (position + (padded - length) // 2) // window

    return [y for y in everywhere if tile(y[0], height) == tile(x[0], height) and tile(y[1], width) == tile(x[1], width)]


def loop_joint(q, k, v, num_heads, neighbourhood, window):
    """Eqs. 9 and 10: sum over y in N(x) and h in G of softmax(<Q(x,g), K(y,h)> / sqrt(d_k)) V(y,h), one head at a time."""
    channels, order, height, width = q.shape
    out, dim = torch.zeros_like(q), channels // num_heads
    for n in range(num_heads):
        head = slice(n * dim, (n + 1) * dim)
        for x in itertools.product(range(height), range(width)):
            near = neighbours(x, (height, width), neighbourhood, window)
            for g in range(order):
                query = q[head, g, x[0], x[1]]
                pairs = [(y, h) for y in near for h in range(order)]
                scores = torch.stack([query @ k[head, h, y[0], y[1]] / math.sqrt(dim) for y, h in pairs])
                weights = scores.exp() / scores.exp().sum()
                out[head, g, x[0], x[1]] = sum(w * v[head, h, y[0], y[1]] for w, (y, h) in zip(weights, pairs, strict=True))
    return out


def loop_spatial(q, k, v, num_heads, neighbourhood, window):
    """The released code: a token is a position, the element axis is inside the inner product."""
    channels, order, height, width = q.shape
    out, dim = torch.zeros_like(q), channels // num_heads
    for n in range(num_heads):
        head = slice(n * dim, (n + 1) * dim)
        for x in itertools.product(range(height), range(width)):
            near = neighbours(x, (height, width), neighbourhood, window)
            query = q[head, :, x[0], x[1]].flatten()
            scores = torch.stack([query @ k[head, :, y[0], y[1]].flatten() / math.sqrt(dim * order) for y in near])
            weights = scores.exp() / scores.exp().sum()
            out[head, :, x[0], x[1]] = sum(w * v[head, :, y[0], y[1]] for w, y in zip(weights, near, strict=True))
    return out


def loop_per_element(q, k, v, num_heads, neighbourhood, window):
    """Joint attention on a group of one element, for each element apart."""
    order = q.shape[1]
    maps = [loop_joint(q[:, [g]], k[:, [g]], v[:, [g]], num_heads, neighbourhood, window) for g in range(order)]
    return torch.cat(maps, dim=1)


def attend_in(q, k, v, *, neighbourhood, window_size=3, shifted=False, **options):
    if neighbourhood == "local":
        return attend_neighbours(q, k, v, window_size, **options)
    sides = q.shape[-2:] if neighbourhood == "global" else (window_size, window_size)
    tilings = [tile_axis(size, side, shifted=shifted) for size, side in zip(q.shape[-2:], sides, strict=True)]
    return attend_windows(q, k, v, *tilings, **options)


LOOPS = {"joint": loop_joint, "spatial": loop_spatial, "per_element": loop_per_element}


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize(
    ("neighbourhood", "size"), [("global", (2, 3)), ("window", (4, 5)), ("window", (3, 2)), ("local", (3, 4))]
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_vs_loop(attention, neighbourhood, size, group):
    order, channels, heads, window = Group.parse(group).order, 4, 2, 3
    q, k, v = torch.randn(3, 1, channels, order, *size, dtype=torch.float64)
    out = attend_in(
        q, k, v, neighbourhood=neighbourhood, window_size=window, shifted=False, attention=attention, num_heads=heads
    )
    expected = LOOPS[attention](q[0], k[0], v[0], heads, neighbourhood, window)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)


def test_equivariance_proof():
    """The paper's proof, stage by stage (its Eqs. 12 to 21): Q, K, V, the weights A, and the output all turn with F."""
    group = Group.parse("p4m")
    project = ConvProjection(group, 4, 3, projection="full", filters="auto").double()
    features = torch.randn(1, 4, 8, 4, 4, dtype=torch.float64)

    def weights(q, k):
        tokens = [x[0].flatten(1) for x in (q, k)]  # [C, G*H*W]
        scores = tokens[0].T @ tokens[1] / math.sqrt(4)
        return scores.softmax(dim=1).view(8, 4, 4, 8, 4, 4)  # A(x, g; y, h)

    q, k, v = project(features)
    upright = weights(q, k)
    for g in range(group.order):
        q_g, k_g, v_g = project(act_on_features(features, group, g))
        for turned, original in ((q_g, q), (k_g, k), (v_g, v)):
            torch.testing.assert_close(turned, act_on_features(original, group, g), rtol=0, atol=1e-12)
        expected = act_on_features(upright, group, g)  # turns (y, h)
        expected = act_on_features(expected.permute(3, 4, 5, 0, 1, 2), group, g).permute(3, 4, 5, 0, 1, 2)  # turns (x, g)
        torch.testing.assert_close(weights(q_g, k_g), expected, rtol=0, atol=1e-12)
        out = torch.einsum("gyxhts,chts->cgyx", weights(q_g, k_g), v_g[0])
        original = torch.einsum("gyxhts,chts->cgyx", upright, v[0])
        torch.testing.assert_close(out, act_on_features(original, group, g), rtol=0, atol=1e-12)


@pytest.mark.parametrize("neighbourhood", NEIGHBOURHOODS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("projection", ["full", "separable"])
def test_attention_is_equivariant(exact_group, attention, neighbourhood, projection):
    layer = GroupConvAttention(
        exact_group, 4, 2, attention=attention, neighbourhood=neighbourhood, window_size=3, projection=projection
    ).double()
    for size in ((6, 6), (7, 5), (8, 10)):
        x = torch.randn(2, 4, layer.group.order, *size, dtype=torch.float64)
        assert equivariance_error(layer, x, exact_group, relative=True, reduction="max").max() <= 1e-12


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_reduced_keys_and_values_are_means_of_parts(attention):
    """6 x 4 pixels in parts of 2 x 2: the loop over 3 x 2 keys, each the mean of four."""
    q, k, v = torch.randn(3, 1, 4, 8, 6, 4, dtype=torch.float64)
    means = [x[0].unflatten(-1, (2, 2)).unflatten(-3, (3, 2)).mean((-1, -3)) for x in (k, v)]  # [C, G, 3, 2]
    out = attend_map(q, k, v, 2, attention=attention, num_heads=2)
    pixels = list(itertools.product(range(6), range(4)))
    for x in pixels:  # one query at a time, on a map of the size of the keys
        query = q[0, :, :, x[0], x[1]][:, :, None, None].expand(-1, -1, 3, 2)
        expected = LOOPS[attention](query, *means, 2, "global", 3)[..., 0, 0]
        torch.testing.assert_close(out[0, :, :, x[0], x[1]], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("reduction", [1, 2])
def test_stored_scores_equal_fused_attention_and_its_definition(num_heads, reduction, monkeypatch):
    q, k, v = torch.randn(3, 2, 6, 4, 4, 6, dtype=torch.float64).unbind()
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    weight = torch.randn_like(q)
    found = []
    for scores in (0, 100):
        monkeypatch.setattr(attention_module, "SCORES", scores)
        out = attend_map(*tensors, reduction, attention="spatial", num_heads=num_heads)
        found.append((out, *torch.autograd.grad((out * weight).sum(), tensors)))
    for fused, stored in zip(*found, strict=True):
        torch.testing.assert_close(stored, fused, rtol=0, atol=1e-12)
    if reduction == 1:
        expected = torch.stack([loop_spatial(*maps, num_heads, "global", 3) for maps in zip(q, k, v, strict=True)])
        torch.testing.assert_close(found[1][0], expected, rtol=0, atol=1e-12)


def test_scores_are_stored_where_they_are_few_and_nothing_else_asks_for_tokens(monkeypatch):
    def stored(side, attention="spatial", num_heads=2, dropout=0.0):
        calls = []
        monkeypatch.setattr(attention_module, "attend_positions", lambda q, *_: calls.append(q) or q)
        q, k, v = torch.randn(3, 1, 4, 4, side, side).unbind()
        attend_map(q, k, v, 1, attention=attention, num_heads=num_heads, dropout=dropout)
        return bool(calls)

    assert stored(6) and not stored(8)  # 2 * 36 and 2 * 64 scores for each query, 6 * 16 numbers at each position
    assert stored(8, num_heads=1)
    assert not stored(2, attention="joint") and not stored(2, attention="per_element") and not stored(2, dropout=0.5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_reduced_attention_is_equivariant_at_every_size(exact_group, attention):
    layer = GroupConvAttention(exact_group, 4, 2, attention=attention, kv_reduction=2).double()
    for size in ((6, 6), (7, 5), (1, 4)):
        x = torch.randn(2, 4, layer.group.order, *size, dtype=torch.float64)
        assert equivariance_error(layer, x, exact_group, relative=True, reduction="max").max() <= 1e-12
    assert layer.attention_multiply_adds(7, 5) == measured_macs(layer, x.new_zeros(1, 4, layer.group.order, 7, 5)).attention


def tile_attention(x, window, shift=0):
    """Windows padded at the far end only (the released code) or cyclically shifted (Swin's): a reference that can be wrong."""
    height, width = x.shape[-2:]
    padding = (0, -width % window, 0, -height % window)
    x = F.pad(x, padding).roll((-shift, -shift), (-2, -1))
    mask = F.pad(torch.ones(1, 1, 1, height, width, dtype=x.dtype), padding).roll((-shift, -shift), (-2, -1))
    tiles = x.unfold(-2, window, window).unfold(-2, window, window).flatten(-2)  # [B, C, G, rows, columns, w*w]
    keep = mask.unfold(-2, window, window).unfold(-2, window, window).flatten(-2)[0, 0, 0]
    scores = torch.einsum("bcgijs,bcgijt->bijst", tiles, tiles) / 4
    scores = scores.masked_fill(keep[None, :, :, None] == 0, -torch.inf)
    out = torch.einsum("bijst,bcgijt->bcgijs", scores.softmax(-1), tiles)
    out = out.unflatten(-1, (window, window)).permute(0, 1, 2, 3, 5, 4, 6).flatten(-2).flatten(-3, -2)
    return out.roll((shift, shift), (-2, -1))[..., :height, :width]


def is_exact(f, size):
    x = torch.randn(1, 2, 8, size, size, dtype=torch.float64)
    return bool(equivariance_error(f, x, "p4m", relative=True).max() < 1e-12)


def test_window_rule():
    """Windows are exact iff they lie symmetrically. Padding only at the far end (the released code) is exact iff w | H."""
    for size in range(4, 16):
        for window in (2, 3, 4, 5, 7):
            if window > size:
                continue
            assert is_exact(lambda x, w=window: tile_attention(x, w), size) == (size % window == 0)
            layer = GroupConvAttention("p4m", 2, 1, neighbourhood="window", window_size=window, attention="spatial").double()
            if window % 2 == 0 and size % 2:
                with pytest.raises(
                    EquivarianceError, match=f"even windows of {window}.* odd height {size} .*nearest exact: height"
                ):
                    layer.output_size(size, size)
                with pytest.raises(EquivarianceError, match="nearest exact"):
                    layer(torch.zeros(1, 2, 8, size, size, dtype=torch.float64))
            else:
                assert layer.output_size(size, size) == (size, size)
                assert is_exact(layer, size)


def test_shift_rule():
    """Windows shifted by t are exact iff 2t mod w = 0: half an even window. Ours only offers that."""
    for size, window in ((16, 8), (14, 7), (12, 4), (12, 6)):
        for shift in range(window):
            exact = is_exact(lambda x, w=window, t=shift: tile_attention(x, w, t), size)
            assert exact == (2 * shift % window == 0), (size, window, shift)
    for size in (6, 8, 10, 12):
        options = {"neighbourhood": "window", "window_size": 4, "attention": "joint"}
        shifted = GroupConvAttention("p4m", 2, 1, shifted=True, **options).double()
        assert is_exact(shifted, size)
        plain = GroupConvAttention("p4m", 2, 1, **options).double()
        plain.load_state_dict(shifted.state_dict())
        x = torch.randn(1, 2, 8, size, size, dtype=torch.float64)
        assert not torch.allclose(plain(x), shifted(x), atol=1e-6)
    with pytest.raises(EquivarianceError, match="windows of 7 cannot be shifted by half a window; .* 6 or 8"):
        GroupConvAttention("p4", 2, 1, neighbourhood="window", window_size=7, shifted=True)


def test_shifted_windows_cross_the_borders_of_plain_ones():
    """With window 4 on 8 pixels, the shifted windows are columns 0-1, 2-5, 6-7."""
    q = k = torch.zeros(1, 1, 1, 8, 8, dtype=torch.float64)
    v = torch.arange(8, dtype=torch.float64).expand(1, 1, 1, 8, 8)
    options = {"neighbourhood": "window", "window_size": 4, "attention": "joint", "num_heads": 1}
    shifted = attend_in(q, k, v, shifted=True, **options)[0, 0, 0, 0]
    assert shifted.tolist() == pytest.approx([0.5, 0.5, 3.5, 3.5, 3.5, 3.5, 6.5, 6.5])
    plain = attend_in(q, k, v, shifted=False, **options)[0, 0, 0, 0]
    assert plain.tolist() == pytest.approx([1.5] * 4 + [5.5] * 4)


def test_padded_keys_take_no_attention():
    """A constant value comes out as itself: no weight leaks to the padding."""
    layer_options = {"neighbourhood": "window", "window_size": 7, "shifted": False, "num_heads": 1}
    q, k = torch.randn(2, 1, 2, 4, 10, 12)
    for attention in ATTENTIONS:
        out = attend_in(q, k, torch.ones_like(q), attention=attention, **layer_options)
        torch.testing.assert_close(out, torch.ones_like(q))


@pytest.mark.parametrize("group", EXACT_GROUPS)
def test_every_parameter_gets_a_gradient(group):
    layer = GroupConvAttention(group, 4, 2)
    layer(torch.randn(1, 4, layer.group.order, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_heads_split_fields_and_not_elements():
    """With one head per field, fields do not mix inside attention."""
    q, k, v = torch.randn(3, 1, 3, 4, 4, 4, dtype=torch.float64)
    options = {"neighbourhood": "global", "window_size": 1, "shifted": False, "attention": "joint", "num_heads": 3}
    before = attend_in(q, k, v, **options)
    changed = v.clone()
    changed[:, 1] += 1
    after = attend_in(q, k, changed, **options)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]]) and not torch.allclose(before[:, 1], after[:, 1])


def test_attention_dropout_acts_in_training_only():
    layer = GroupConvAttention("p4", 4, 2, attn_dropout=0.5)
    x = torch.randn(1, 4, 4, 5, 5)
    assert not torch.equal(layer.train()(x), layer.train()(x))
    assert torch.equal(layer.eval()(x), layer.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide the 12 fields; choose 1, 2, 3, 4, 6, 12"),
        ({"num_heads": 0}, "num_heads=0 does not divide"),
        ({"attention": "linear"}, "unknown attention 'linear'; choose joint, spatial, per_element"),
        ({"neighbourhood": "disc"}, "unknown neighbourhood 'disc'; choose global, window, local"),
        ({"projection": "dense"}, "unknown projection 'dense'; choose full, separable"),
        ({"kernel_size": 4}, "must be odd to keep the size, got 4; nearest: 3 and 5"),
        ({"neighbourhood": "local", "window_size": 4}, "window_size must be odd and >= 1 for local attention, got 4"),
        ({"neighbourhood": "window", "window_size": 0}, "window_size must be >= 1"),
        ({"shifted": True}, "only windows can be shifted, got neighbourhood='global'"),
        ({"kv_reduction": 0}, "kv_reduction must be a whole number >= 1, got 0"),
        ({"kv_reduction": 2, "neighbourhood": "window"}, "kv_reduction=2 needs neighbourhood='global', got 'window'"),
        ({"attn_dropout": 1.5}, r"attn_dropout must be in \[0, 1\), got 1.5"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GroupConvAttention("p4", 12, **{"num_heads": 2, **options})


def test_it_prints_what_it_is():
    layer = GroupConvAttention("p4m", 8, 2, neighbourhood="window", window_size=4, shifted=True)
    assert "p4m, 8 fields, 2 heads, joint, window 4 shifted" in repr(layer)


@pytest.mark.parametrize("shifted", [False, True])
def test_without_strict_impossible_windows_warn_once_and_go_on(shifted):
    options = {"neighbourhood": "window", "window_size": 4, "shifted": shifted, "strict": False}
    layer = GroupConvAttention("p4", 2, 1, **options).double()
    x = torch.randn(1, 2, 4, 9, 9, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="even windows of 4 cannot tile an odd height 9"):
        layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert equivariance_error(layer, x.detach(), "p4", relative=True).max() > 1e-3  # and no second warning
