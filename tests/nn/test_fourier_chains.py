"""Layers that stay in the Fourier basis between two maps: the MLP and spatial attention, beside what they are made of."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.actions import act_on_features
from revit.groups import Group
from revit.nn import GroupConvAttention, GroupMLP, TransformerBlock, fourier, fourier_attention, fourier_mlp, set_algorithm
from revit.nn.block import run_checkpointed

GROUPS = ["z2m", "p4", "p4m", "p8", "p8m", "p16"]


@pytest.fixture(params=["one part", "many parts on threads"])
def parts(request, monkeypatch):
    """All samples at once with hidden maps that are kept, or a few at a time with such that are computed again: results must
    not depend on it."""
    if request.param != "one part":
        monkeypatch.setattr(fourier, "CACHE", 2**14)
        monkeypatch.setattr(fourier_mlp, "KEPT", 0)


@pytest.fixture
def chained(monkeypatch):
    """How often layers ran in one go."""
    calls = []
    for module, name in ((fourier_mlp, "_MLP"), (fourier_attention, "_Attention")):
        original = getattr(module, name).apply
        monkeypatch.setattr(getattr(module, name), "apply", lambda *a, original=original: calls.append(1) or original(*a))
    return calls


def twins(layer):
    """The same layer in double precision: dense, and in the Fourier basis."""
    dense = layer.double().train()
    other = copy.deepcopy(dense)
    set_algorithm(dense, "dense")
    set_algorithm(other, "fourier")
    return dense, other


def maps(group, fields, size=(5, 6), samples=5, offset=0.0):
    return offset + torch.randn(samples, fields, Group.parse(group).order, *size, dtype=torch.float64)


def run(layer, x):
    """Everything that a step finds: the output, gradients, and what norms remember."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = layer(x)
    grads = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])
    return [out, *grads, *layer.buffers()]


def assert_alike(found, expected, tolerance=1e-10):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("group", GROUPS)
def test_mlp_equals_its_layers(group, dropout, parts, chained):
    torch.manual_seed(0)
    dense, other = twins(GroupMLP(group, 4, ratio=2, dropout=dropout))
    nn.init.normal_(dense.norm1.weight), nn.init.normal_(dense.norm1.bias)
    other.load_state_dict(dense.state_dict())
    x = maps(group, 4)
    plain = copy.deepcopy(dense)
    expected = run(dense, x)
    assert not chained
    assert_alike(run(other, x), expected)
    assert len(chained) == 1
    torch.manual_seed(1)  # and by its definition, from modules of torch alone
    hidden = F.batch_norm(plain.fc1(x), None, None, plain.norm1.weight, plain.norm1.bias, training=True)
    hidden = F.dropout3d(hidden, dropout).relu()
    torch.testing.assert_close(plain.drop2(plain.norm2(plain.fc2(hidden))), expected[0], rtol=0, atol=1e-10)


def test_mlp_of_maps_with_large_means(parts, chained):
    """Where the mean is far larger than the deviation, sums of squares have no digits left: it goes first."""
    torch.manual_seed(0)
    dense, other = twins(GroupMLP("p4", 3, ratio=2))
    with torch.no_grad():
        for layer in (dense, other):
            layer.fc1.weight.abs_()
    x = maps("p4", 3, offset=1e6)
    assert_alike(run(other, x)[:1], run(dense, x)[:1], 1e-7)
    assert chained


def test_mlp_without_a_gradient_of_its_input(parts):
    dense, other = twins(GroupMLP("p4", 3, ratio=2))
    x = maps("p4", 3)
    found = [torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters())) for layer in (dense, other)]
    assert_alike(*found)


@pytest.mark.parametrize("projection", ["full", "separable"])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_attention_equals_its_layers(group, num_heads, projection, parts, chained):
    torch.manual_seed(0)
    options = {"kernel_size": 3, "attention": "spatial", "projection": projection, "filters": "steerable"}
    dense, other = twins(GroupConvAttention(group, 6, num_heads, **options))
    x = maps(group, 6, size=(3, 4))
    expected = run(dense, x)
    assert not chained
    assert_alike(run(other, x), expected)
    assert len(chained) == 1


@pytest.mark.parametrize(
    "change",
    [{"attention": "joint"}, {"attention": "per_element"}, {"neighbourhood": "window", "window_size": 2}, {"kv_reduction": 2},
     {"attn_dropout": 0.5}],
)  # fmt: skip
def test_other_attention_takes_other_ways(change, chained):
    layer = GroupConvAttention("p4", 4, 2, kernel_size=1, **{"attention": "spatial", **change}).train()
    set_algorithm(layer, "fourier")
    layer(torch.randn(2, 4, 4, 4, 4)).sum().backward()
    assert not chained


def test_only_training_stays_in_the_basis(chained):
    """Inference, lower precision, layer norm and dropout of single numbers have layers one by one."""
    block = TransformerBlock(4, GroupConvAttention("p4", 4, 1, attention="spatial"), GroupMLP("p4", 4, dropout=0.1))
    set_algorithm(block, "fourier")
    x = torch.randn(2, 4, 4, 4, 4)
    with torch.no_grad():
        block.eval()(x)
        block.train()(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block(x)
    for mlp in (GroupMLP("p4", 4, norm="layer"), GroupMLP("p4", 4, dropout=0.1, elementwise_dropout=True)):
        set_algorithm(mlp, "fourier")
        mlp.train()(x)
    assert not chained
    block(x)
    assert len(chained) == 2


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
def test_a_block_in_training_is_exact(group, chained):
    torch.manual_seed(0)
    attention = GroupConvAttention(group, 4, 2, attention="spatial")
    _, block = twins(TransformerBlock(4, attention, GroupMLP(group, 4)))
    x = maps(group, 4, size=(4, 5))
    for g in range(attention.group.order):
        torch.testing.assert_close(block(act_on_features(x, group, g)), act_on_features(block(x), group, g), rtol=0, atol=1e-10)
    assert chained


def test_a_checkpointed_block_counts_its_batch_once(chained):
    torch.manual_seed(0)
    _, block = twins(TransformerBlock(4, GroupConvAttention("p4", 4, 2, attention="spatial"), GroupMLP("p4", 4, dropout=0.2)))
    other, x = copy.deepcopy(block), maps("p4", 4)

    def again(x):
        return run_checkpointed(other, x, [other])

    again.parameters, again.buffers = other.parameters, other.buffers
    assert_alike(run(again, x), run(block, x), 0.0)
    assert other.mlp.norm1.num_batches_tracked == 1 and len(chained) == 6


def test_gradients_by_differences(parts):
    torch.manual_seed(0)
    mlp, attention = GroupMLP("p4", 2, ratio=2).double(), GroupConvAttention("p4", 2, 1, attention="spatial").double()
    for layer in (mlp, attention):
        set_algorithm(layer, "fourier")
        assert torch.autograd.gradcheck(layer, maps("p4", 2, size=(3, 2), samples=3).requires_grad_())
