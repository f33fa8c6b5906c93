"""Group self-attention with relative positions against a loop written from Eq. 5, and what its encodings must do."""

import itertools
import math
import re

import pytest
import torch

from revit.actions import act_on_features, act_on_plane
from revit.evaluation.complexity import count_macs, measured_macs
from revit.groups import Group
from revit.nn import local_attention
from revit.nn.local_attention import attend_local
from revit.nn.relative_attention import RelativeSelfAttention, attend_unfolded, turned_offsets


def layer(group, *, lifting=False, patch_size=3, heads=2, dim=5, channels=3, out=2):
    made = RelativeSelfAttention(
        group, channels, out, num_heads=heads, mid_channels=dim, patch_size=patch_size, lifting=lifting
    ).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()  # biases and encodings that matter
    return made


def image_or_map(made, height, width):
    order = () if made.lifting else (made.group.order,)
    return torch.randn(2, made.in_channels, *order, height, width, dtype=torch.float64)


def loop(made, x, element_of=None):
    """out(x, v) = W_out sum_g sum_{h, y} softmax(<q(x, g), k(y, h) + P_row + P_column + G_{g^-1 h}> / sqrt(C)) val(y, h).

    Encodings fill the row, column and element parts of the key's vector; offsets are turned back by v as points of the plane.
    """
    group, dim = made.group, made.mid_channels
    x = x.unsqueeze(2) if made.lifting else x
    batch, channels, order, height, width = x.shape
    reach = max(height, width) - 1 if made.patch_size is None else made.patch_size // 2
    weight, bias = made.qkv.weight.flatten(1), made.qkv.bias
    inner = torch.zeros(batch, made.num_heads * dim, group.order, height, width, dtype=x.dtype)
    pixels = list(itertools.product(range(height), range(width)))
    for b, head in itertools.product(range(batch), range(made.num_heads)):
        rows = [slice((part * made.num_heads + head) * dim, (part * made.num_heads + head + 1) * dim) for part in range(3)]
        q, k, val = (lambda g, p, r=r, b=b: weight[r] @ x[b, :, g, p[0], p[1]] + bias[r] for r in rows)
        for p, v in itertools.product(pixels, range(group.order)):
            back = group.matrix[v].T
            total = torch.zeros(dim, dtype=x.dtype)
            for g in range(order):
                scores, values = [], []
                for y in pixels:
                    offset = torch.tensor([y[1] - p[1], p[0] - y[0]], dtype=x.dtype)  # x to the right, y up
                    if made.patch_size is not None and offset.abs().max() > reach:
                        continue
                    across, up = back @ offset / max(reach, 1)
                    place = torch.cat((made.row(up), made.column(across)))
                    for h in range(order):
                        encoding = torch.zeros(dim, dtype=x.dtype)
                        encoding[: len(place)] = place
                        if not made.lifting:
                            relative = int(group.product[group.inverse[g], h])
                            relative = relative if element_of is None else element_of(v, g, h)
                            encoding[len(place) :] = made.elements[relative]
                        scores.append(q(g, p) @ (k(h, y) + encoding) / math.sqrt(channels))
                        values.append(val(h, y))
                total = total + torch.stack(scores).softmax(0) @ torch.stack(values)
            inner[b, head * dim : (head + 1) * dim, v, p[0], p[1]] = total
    return made.proj(inner)


@pytest.mark.parametrize("patch_size", [3, None])
@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_equals_a_loop_written_from_equation_5(group, lifting, patch_size):
    made = layer(group, lifting=lifting, patch_size=patch_size, heads=1, channels=2)
    x = image_or_map(made, 2, 3)[:1]
    with torch.no_grad():
        torch.testing.assert_close(made(x), loop(made, x), rtol=1e-10, atol=1e-10)


def test_heads_are_those_of_the_loop():
    made = layer("z2m", heads=3)
    x = image_or_map(made, 3, 2)
    with torch.no_grad():
        torch.testing.assert_close(made(x), loop(made, x), rtol=1e-10, atol=1e-10)


def errors(made, x, run=None):
    """Largest relative difference between turning the input and turning the output, by element."""
    run = run or made
    turn = act_on_plane if made.lifting else act_on_features
    with torch.no_grad():
        out = run(x)
        found = {}
        for element in range(1, made.group.order):
            if made.group.is_exact_element(element):
                difference = run(turn(x, made.group, element)) - act_on_features(out, made.group, element)
                found[element] = float(difference.abs().max() / out.abs().max())
    return found


@pytest.mark.parametrize("patch_size", [1, 5, None])
@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("group", ["z2m", "p4", "p4m", "p8", "p12"])
def test_turns_with_the_group(group, lifting, patch_size):
    made = layer(group, lifting=lifting, patch_size=patch_size)
    for size in ((5, 5), (4, 6)):
        assert max(errors(made, image_or_map(made, *size)[:1]).values()) <= 1e-12


def test_an_element_encoding_that_follows_the_output_element_does_not_turn():
    """The guard: v^-1 g^-1 h, as the published code has it, in place of g^-1 h."""
    made = layer("p4", heads=1, channels=2, out=1)
    product, inverse = made.group.product, made.group.inverse

    def follow(v, g, h):
        return int(product[inverse[v], product[inverse[g], h]])

    x = image_or_map(made, 2, 2)[:1]
    assert max(errors(made, x, lambda x: loop(made, x, follow)).values()) > 1e-2


def inputs(batch, order, outputs, dim, size, height, width):
    shapes = [(batch, 2, dim, order, height, width)] * 3 + [(7, dim), (order, order, dim)]
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return [*tensors, torch.randint(0, 7, (size**2, outputs))]


@pytest.mark.parametrize("chunk", [1, 10**6])
def test_gradients_are_the_derivatives(monkeypatch, chunk):
    monkeypatch.setattr(local_attention, "CHUNK", chunk)
    *tensors, encoding_of = inputs(2, 2, 3, 2, 3, 2, 3)
    assert torch.autograd.gradcheck(lambda *x: attend_local(*x, encoding_of, 3, 0.7), tensors, fast_mode=True)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_loop_over_offsets_equals_unfolded_neighbours(size):
    """Two implementations, values and all gradients; the map may be smaller than the neighbourhood."""
    for height, width in ((4, 6), (2, 3)):
        *tensors, encoding_of = inputs(5, 4, 4, 3, size, height, width)
        results = []
        for attend in (attend_local, attend_unfolded):
            out = attend(*tensors, encoding_of, size, 0.7)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.fixture
def threads():
    """Sets the number of threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same(monkeypatch, threads):
    monkeypatch.setattr(local_attention, "CHUNK", 1)  # a part for each sample and head
    *tensors, encoding_of = inputs(3, 2, 4, 3, 3, 4, 5)
    results = []
    for count in (1, 2, 3, 16):
        threads(count)
        out = attend_local(*tensors, encoding_of, 3, 0.7)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        assert torch.get_num_threads() == count
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_batch_may_be_empty(threads):
    threads(2)
    *tensors, encoding_of = inputs(0, 2, 2, 3, 3, 3, 3)
    out = attend_local(*tensors, encoding_of, 3, 0.7)
    out.sum().backward()
    assert out.shape == (0, 2, 3, 2, 3, 3) and tensors[3].grad.abs().max() == 0


def test_an_error_in_a_thread_is_raised(monkeypatch, threads):
    threads(2)
    monkeypatch.setattr(local_attention.Streams, "mean", lambda self: 1 / 0)
    *tensors, encoding_of = inputs(2, 2, 2, 3, 3, 3, 3)
    with pytest.raises(ZeroDivisionError):
        attend_local(*tensors, encoding_of, 3, 0.7)
    assert torch.get_num_threads() == 2


def test_custom_operator_is_well_formed():
    *tensors, encoding_of = inputs(2, 2, 2, 3, 3, 3, 3)
    torch.library.opcheck(torch.ops.revit.local_attention.default, (*tensors, encoding_of, 3, 0.7))


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_extreme_scores_stay_finite(scale):
    made = layer("p4", patch_size=3).float()
    x = (scale * image_or_map(made, 5, 5)).float().requires_grad_()
    out = made(x)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    torch.testing.assert_close(out.double(), made.double()(x.double()), rtol=1e-3, atol=1e-3 * float(out.detach().abs().max()))


@pytest.mark.parametrize(("group", "points"), [("z2", 25), ("z2m", 25), ("p4", 25), ("p4m", 25), ("p8", 49), ("p12", 73)])
def test_turned_offsets_are_listed_once(group, points):
    """90 degrees move offsets onto offsets; the centre stays whatever the angle."""
    found, which = turned_offsets(Group.parse(group), 5, 5)
    assert len(found) == points and which.shape == (25, Group.parse(group).order)
    upright = found[which[:, 0]]
    assert upright[0].tolist() == [-2, 2] and upright[1].tolist() == [-1, 2] and upright[12].tolist() == [0, 0]
    for element, matrix in enumerate(Group.parse(group).matrix):
        torch.testing.assert_close(found[which[:, element]] @ matrix.T, upright, rtol=0, atol=1e-8)


@pytest.mark.parametrize("patch_size", [3, None])
@pytest.mark.parametrize("lifting", [False, True])
def test_formula_of_products_is_what_torch_counts(lifting, patch_size):
    made = layer("p4", lifting=lifting, patch_size=patch_size).float()
    x = image_or_map(made, 5, 6)[:1].float()
    made.in_chans = made.in_channels
    counted = measured_macs(made, x)
    assert counted.attention == made.attention_multiply_adds(5, 6)
    if lifting:
        assert count_macs(made, (5, 6)).total == counted.total


def test_products_grow_with_the_square_of_the_group():
    """The formula of Eq. 5 pairs every (v, g, h); here the largest term pairs two of them."""
    counts = [layer(f"p{n}", patch_size=5, dim=30).attention_multiply_adds(10, 10) for n in (4, 8)]
    assert counts[1] / counts[0] < 4.6


@pytest.mark.parametrize("patch_size", [3, None])
def test_half_precision_is_near_and_trains(patch_size):
    made = layer("p4", patch_size=patch_size).float()
    x = image_or_map(made, 5, 5).float()
    exact = made(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
    out.float().square().sum().backward()
    assert (out.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in made.parameters())


def test_every_parameter_gets_a_gradient():
    made = layer("p4m")
    made(image_or_map(made, 5, 5)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in made.parameters())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("patch_size", [3, None])
def test_traces_to_the_same_function(patch_size):
    made = layer("p4", patch_size=patch_size).eval()
    x = image_or_map(made, 5, 5)
    with torch.no_grad():
        traced = torch.jit.trace(made, x, check_trace=False)
        torch.testing.assert_close(traced(x.flip(-1)), made(x.flip(-1)), rtol=1e-12, atol=1e-12)
        exported = torch.export.export(made, (x,)).module()
        torch.testing.assert_close(exported(x.flip(-1)), made(x.flip(-1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 4}, "patch_size is an odd number of pixels, or None for the whole map; got 4"),
        ({"patch_size": 0}, "patch_size is an odd number of pixels, or None for the whole map; got 0"),
        ({"heads": 0}, "num_heads must be a whole number >= 1, got 0"),
        ({"dim": 2}, "a key of 2 entries has no room for 3 encodings; choose at least 3"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layer("p4", **options)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=re.escape("expected images [B, 3, H, W], got shape [2, 1, 5, 5]")):
        layer("p4", lifting=True)(torch.zeros(2, 1, 5, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=re.escape("expected features [B, 3, 4, H, W] on p4, got shape [2, 3, 8, 5, 5]")):
        layer("p4")(torch.zeros(2, 3, 8, 5, 5, dtype=torch.float64))
