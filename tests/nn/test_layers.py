"""Norms, dropout, pooling, down-sampling, MLP, block and head; and every layer in one table of float64 exactness."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from revit.actions import act_on_features, act_on_plane
from revit.equivariance import equivariance_error
from revit.exactness import EquivarianceError
from revit.groups import Group
from revit.nn import (
    Canonical,
    Downsample,
    DropPath,
    FieldBatchNorm,
    FieldLayerNorm,
    GroupConv,
    GroupConvAttention,
    GroupLinear,
    GroupMLP,
    GroupPool,
    InvariantHead,
    LiftingConv,
    LiftingLayer,
    SpatialPool,
    TransformerBlock,
    UpsampleJoin,
    fit_to_stride,
    make_dropout,
    make_norm,
    normalization,
    set_algorithm,
)
from revit.nn.block import run_checkpointed
from revit.nn.filter_bank import TurnedFilters


def block(group, norm="batch"):
    return TransformerBlock(4, GroupConvAttention(group, 4, 2), GroupMLP(group, 4, norm=norm), norm=norm)


class Joined(nn.Module):
    """A decoder step on a map and on the map that it was pooled from, which has other and odd sizes."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        return self.step(F.adaptive_avg_pool2d(x.flatten(1, 2), 3).unflatten(1, x.shape[1:3]), x)


LAYERS = {
    "lifting": lambda g: LiftingConv(g, 4, 3, 3, padding=1),
    "lifting_even_stride": lambda g: LiftingConv(g, 4, 3, 4, stride=2, padding=1),
    "lifting_layer_stride_4": lambda g: LiftingLayer(g, 4, 3, stride=4, odd=False, filters="auto", strict=True),
    "group_conv": lambda g: GroupConv(g, 4, 3, 3, padding=1),
    "group_conv_even_stride": lambda g: GroupConv(g, 4, 6, 4, stride=2, padding=1, groups=2),
    "group_conv_dilated": lambda g: GroupConv(g, 4, 3, 3, padding=2, dilation=2, filters="rbf"),
    "group_conv_steerable": lambda g: GroupConv(g, 4, 3, 5, padding=2, filters="steerable"),
    "per_field_conv": lambda g: GroupConv(g, 4, 4, 5, padding=2, groups=4),
    "linear": lambda g: GroupLinear(g, 4, 3),
    "batch_norm": lambda g: make_norm("batch", 4),
    "layer_norm": lambda g: make_norm("layer", 4),
    "downsample": lambda g: Downsample(g, 4, 6),
    "attention_joint": lambda g: GroupConvAttention(g, 4, 2),
    "attention_spatial": lambda g: GroupConvAttention(g, 4, 2, attention="spatial", projection="full"),
    "attention_window": lambda g: GroupConvAttention(g, 4, 2, neighbourhood="window", window_size=3),
    "mlp": lambda g: GroupMLP(g, 4),
    "block": block,
    "block_layer_norm": lambda g: block(g, "layer"),
    "group_pool_max": lambda g: GroupPool("max"),
    "group_pool_mean": lambda g: GroupPool("mean"),
    "head": lambda g: InvariantHead(4, 5, hidden=8),
    "upsample_join": lambda g: Joined(UpsampleJoin(g, 4, 4, 3)),
    "canonical": lambda g: Canonical(nn.Conv2d(4, 3, 3, padding=1), g),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("layer", LAYERS)
def test_fp64_layer(layer, exact_group, training):
    module = LAYERS[layer](exact_group).double().train(training)
    group = Group.parse(exact_group)
    for p in module.parameters():  # away from ones and zeros
        nn.init.normal_(p)
    for size in ((8, 8), (8, 12)):
        image = layer.startswith("lifting") or layer == "canonical"
        x = torch.randn(3, 4, *(() if image else (group.order,)), *size, dtype=torch.float64)
        assert equivariance_error(module, x, group, relative=True, reduction="max").max() <= 1e-12


def test_bn_shared():
    """One mean and variance for all elements of a field: a plain batch norm over C*G channels breaks, in eval too."""
    x = torch.randn(4, 3, 4, 6, 6, dtype=torch.float64) + torch.arange(4).view(4, 1, 1)  # elements differ
    shared, plain = make_norm("batch", 3).double(), nn.BatchNorm2d(12).double()

    def per_channel(x):
        return plain(x.flatten(1, 2)).unflatten(1, (3, 4))

    for training in (True, False):
        shared.train(training), plain.train(training)
        shared(x), per_channel(x)
        assert equivariance_error(shared, x, "p4", relative=True).max() < 1e-12
        if not training:
            assert equivariance_error(per_channel, x, "p4", relative=True).max() > 0.1
    assert shared.running_mean.shape == (3,)


def test_train_mode_orbit_stats():
    """In training the statistics of a batch and of its turned copy are the same."""
    x = torch.randn(4, 3, 8, 6, 6, dtype=torch.float64)
    for g in range(8):
        norms = make_norm("batch", 3).double(), make_norm("batch", 3).double()
        norms[0](x), norms[1](act_on_features(x, "p4m", g))
        torch.testing.assert_close(norms[0].running_mean, norms[1].running_mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(norms[0].running_var, norms[1].running_var, rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("size", [(3, 5, 4, 6, 7), (1, 5, 1, 2, 1), (2, 5, 8, 1, 1)])
def test_batch_norm_is_that_of_torch(size, momentum):
    """Outputs, first and second derivatives, and what is remembered; also far from zero, where squares would lose digits."""
    ours, theirs = make_norm("batch", 5).double(), nn.BatchNorm3d(5).double()
    found = []
    for norm in (ours, theirs):
        torch.manual_seed(0)
        norm.momentum = momentum
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        for _ in range(2):
            x = (3 * torch.randn(size, dtype=torch.float64) + 1000).requires_grad_()
            out, grad = norm(x), torch.randn(size, dtype=torch.float64)
            inputs = [x, norm.weight, norm.bias]
            first = torch.autograd.grad(out, inputs, grad, create_graph=True)
            second = torch.autograd.grad(first[0].pow(3).sum(), inputs[:2])
            found.append([out, *first, *second, *(buffer.clone() for buffer in norm.buffers())])
    for a, b in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("mean", [0.5, 1000.0])
def test_batch_norm_has_the_gradients_of_torch(mean):
    ours, theirs = make_norm("batch", 3).double(), nn.BatchNorm3d(3).double()
    x = 2 * torch.randn(8, 3, 4, 11, 10, dtype=torch.float64) + mean
    found = []
    for norm in (ours, theirs):
        torch.manual_seed(0)
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
        out = norm(leaf)
        found.append([out, *torch.autograd.grad(out, [leaf, norm.weight, norm.bias], grad), *norm.buffers()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_what_is_computed_again_takes_the_statistics_of_the_first_time(monkeypatch):
    """Once a step, also in a block that is computed again with an MLP inside that is; and they are counted once."""
    counted = []
    found = normalization.field_statistics
    monkeypatch.setattr(normalization, "field_statistics", lambda x: counted.append(x.shape) or found(x))
    mlp = GroupMLP("p4", 4).train()
    x = torch.randn(3, 4, 4, 5, 5, requires_grad=True)
    mlp(x).sum().backward()
    assert len(counted) == 2 and mlp.norm1.num_batches_tracked == 1 and mlp.norm1.kept is None
    counted.clear()
    module = block("p4").train()
    run_checkpointed(module, x, [module]).sum().backward()
    assert len(counted) <= 5  # four norms; the hidden one, which the inner part keeps for itself, a second time
    assert all(norm.num_batches_tracked == 1 for norm in module.modules() if isinstance(norm, FieldBatchNorm))


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("algorithm", ["dense", "fourier"])
def test_residual_branches_are_added_by_their_scale(norm, algorithm):
    """The last layer of a branch takes the scale in training: values and gradients are those of the formula."""
    torch.manual_seed(0)
    attn, mlp = GroupConvAttention("p4", 4, 2, attention="spatial"), GroupMLP("p4", 4, norm=norm)
    module = TransformerBlock(4, attn, mlp, norm=norm).double().train()
    nn.init.constant_(module.scale1, 0.7), nn.init.constant_(module.scale2, -0.4)
    set_algorithm(module, algorithm)
    x = torch.randn(2, 4, 4, 6, 6, dtype=torch.float64, requires_grad=True)

    def formula(x):
        x = x + module.scale1 * module.attn(module.norm1(x))
        return x + module.scale2 * module.mlp(module.norm2(x))

    found = []
    for run in (module, formula):
        out = run(x)
        found.append([out, *torch.autograd.grad(out.pow(3).sum(), [x, *module.parameters()])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_batch_norm_leaves_to_torch_what_it_cannot_do_faster():
    """Other layouts and precisions, frozen layers, a single number, wrong shapes: results and messages are those of torch."""
    ours, theirs = make_norm("batch", 3), nn.BatchNorm3d(3)
    x = torch.randn(4, 2, 3, 4, 5).transpose(1, 2)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    with torch.autocast("cpu"):
        torch.testing.assert_close(ours(x.bfloat16()), theirs(x.bfloat16()), rtol=0, atol=0)
    for options in ({"affine": False}, {"track_running_stats": False}):
        torch.testing.assert_close(
            FieldBatchNorm(3, **options)(x.contiguous()), nn.BatchNorm3d(3, **options)(x), rtol=0, atol=1e-6
        )
    for wrong in (torch.ones(1, 3, 1, 1, 1), torch.ones(2, 3, 4, 4), torch.ones(2, 4, 1, 4, 4)):
        messages = []
        for norm in (ours, theirs):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                norm(wrong)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_layer_norm_normalises_the_fields():
    x = torch.randn(2, 16, 4, 3, 3)
    out = FieldLayerNorm(16)(x)
    torch.testing.assert_close(out.mean(1), torch.zeros(2, 4, 3, 3), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.var(1, unbiased=False), torch.ones(2, 4, 3, 3), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="unknown norm 'instance'; choose batch, layer"):
        make_norm("instance", 4)


def test_dropout_drops_whole_fields_and_drop_path_whole_samples():
    x = torch.ones(8, 16, 4, 3, 3)
    kept = make_dropout(0.5)(x).flatten(2)
    assert set(kept.unique().tolist()) == {0.0, 2.0} and torch.equal(kept.amin(2), kept.amax(2))
    element = make_dropout(0.5, elementwise=True)(x).flatten(2)
    assert not torch.equal(element.amin(2), element.amax(2))
    path = DropPath(0.5)(x).flatten(1)
    assert torch.equal(path.amin(1), path.amax(1)) and set(path.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(DropPath(0.5).eval()(x), x) and isinstance(make_dropout(0.0), nn.Identity)
    with pytest.raises(ValueError, match=r"drop_path must be in \[0, 1\), got 1"):
        DropPath(1)


def test_dropout_and_drop_path_commute_with_turning_for_each_mask():
    x = torch.randn(4, 6, 8, 5, 5, dtype=torch.float64)
    for layer in (make_dropout(0.3), DropPath(0.3)):
        for g in range(8):
            torch.manual_seed(3)
            upright = layer(x)
            torch.manual_seed(3)
            assert torch.equal(layer(act_on_features(x, "p4m", g)), act_on_features(upright, "p4m", g))


def test_group_pool_invariance():
    """After pooling over the group the map turns like an image; after pooling over space as well it does not change."""
    x = torch.randn(2, 3, 8, 5, 6)
    for g in range(8):
        turned = act_on_features(x, "p4m", g)
        assert torch.equal(GroupPool("max")(turned), act_on_plane(GroupPool("max")(x), "p4m", g))
        pooled = SpatialPool()(GroupPool("max")(x))
        torch.testing.assert_close(SpatialPool()(GroupPool("max")(turned)), pooled)
        flattened = x.mean(dim=(-2, -1)).flatten(1)
        changed = turned.mean(dim=(-2, -1)).flatten(1)
        assert g == 0 or not torch.allclose(flattened, changed, atol=1e-3)  # the group axis must be pooled
    with pytest.raises(ValueError, match="unknown group pooling 'sum'; choose max, mean"):
        GroupPool("sum")
    with pytest.raises(ValueError, match=r"features \[B, C, G, H, W\], got shape \[2, 3, 5, 5\]"):
        GroupPool()(torch.zeros(2, 3, 5, 5))


@pytest.mark.parametrize("stride", [2, 4])
def test_fitting_to_a_stride_is_symmetric_and_idle_where_it_divides(stride):
    for height in range(1, 14):
        x = torch.randn(2, 3, 4, height, 9, dtype=torch.float64)
        fitted = fit_to_stride(x, stride)
        assert fitted.shape[-2] % stride == 0 and 0 <= fitted.shape[-2] - height < stride
        assert equivariance_error(lambda x: fit_to_stride(x, stride), x, "p4", relative=True).max() < 1e-14
    even = torch.randn(1, 2, 8, 12)
    assert fit_to_stride(even, stride) is even


def test_down_sampling_is_exact_at_every_size_and_the_odd_one_is_not():
    for size in ((7, 7), (8, 8), (5, 8), (1, 3)):
        x = torch.randn(1, 2, 8, *size, dtype=torch.float64)
        layer = Downsample("p4m", 2, 3).double()
        out = layer(x)
        assert out.shape[-2:] == tuple(-(-s // 2) for s in size) == layer.output_size(*size)
        assert equivariance_error(layer, x, "p4m", relative=True).max() < 1e-12
    with pytest.raises(EquivarianceError, match="nearest exact sizes: 7 and 9"):
        Downsample("p4m", 2, 3, odd=True)(torch.zeros(1, 2, 8, 8, 8))
    with pytest.warns(UserWarning, match="not p4m equivariant at height 8"):
        broken = equivariance_error(
            Downsample("p4m", 2, 3, odd=True, strict=False).double(), torch.randn(1, 2, 8, 8, 8).double(), "p4m", relative=True
        )
    assert broken.max() > 0.1


def test_lifting_layer_kernels():
    def sampling(stride, odd):
        return LiftingLayer("p4", 1, 2, stride=stride, odd=odd, filters="auto", strict=True).conv.sampling

    assert [(s.kernel_size, s.padding) for s in (sampling(1, False), sampling(2, False), sampling(4, False))] == [
        (3, 1),
        (4, 1),
        (8, 2),
    ]
    assert [(s.kernel_size, s.padding) for s in (sampling(1, True), sampling(2, True))] == [(3, 1), (5, 2)]
    with pytest.raises(ValueError, match="an exact stride is 1 or even, got 3; nearest: 2 and 4"):
        sampling(3, False)
    with pytest.raises(ValueError, match="stride must be a whole number >= 1, got 0"):
        sampling(0, False)


def test_block_is_two_scaled_residuals():
    module = block("p4").double().eval()
    x = torch.randn(1, 4, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        module.scale1.fill_(0.5), module.scale2.fill_(0.0)
        torch.testing.assert_close(module(x), x + 0.5 * module.attn(module.norm1(x)))
        module.scale1.zero_()
        assert torch.equal(module(x), x)


def test_mlp_needs_a_hidden_field():
    assert GroupMLP("p4", 8, ratio=0.5).fc1.out_channels == 4
    with pytest.raises(ValueError, match="mlp_ratio=0.1 leaves no hidden field of 8; choose at least 0.125"):
        GroupMLP("p4", 8, ratio=0.1)


def test_checkpointing_changes_nothing_but_memory():
    torch.manual_seed(1)
    plain = block("p4").double()
    saved = block("p4").double()
    saved.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4, 4, 6, 6, dtype=torch.float64)
    plain(x).square().sum().backward()
    run_checkpointed(saved, x, [saved]).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12, msg=name)
    for (name, a), b in zip(plain.named_buffers(), saved.buffers(), strict=True):
        assert torch.equal(a, b), name  # running statistics counted once


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_canonical_bit_exact(group):
    """Any network becomes equivariant to the bit in float32: a plain CNN, and a whole equivariant one."""
    cnn = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)).eval()
    ours = nn.Sequential(LiftingConv(group, 3, 4, 3, padding=1), block(group), block(group)).eval()
    classifier = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(5)).eval()
    x = torch.randn(2, 3, 10, 10)
    for network in (cnn, ours, classifier):
        exact = Canonical(network, group)
        with torch.no_grad():
            upright = exact(x)
            for g in range(Group.parse(group).order):
                turned = exact(act_on_plane(x, group, g).contiguous())
                expected = upright if upright.ndim == 2 else act_on_features(upright, group, g)
                assert torch.equal(turned, expected)
    with torch.no_grad():  # the first network's plain form is not even close
        assert not torch.allclose(cnn(torch.rot90(x, 1, (2, 3))), torch.rot90(cnn(x), 1, (2, 3)), atol=1e-2)


def test_canonical_agrees_with_the_layer_it_wraps():
    layer = GroupConv("p4m", 3, 2, 3, padding=1).double()
    x = torch.randn(1, 3, 8, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(Canonical(layer, "p4m")(x), layer(x), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="p8 moves pixels between pixels.*choose z2, z2m, p2"):
        Canonical(layer, "p8")


def test_head_without_classes_returns_features():
    head = InvariantHead(4, 0, hidden=8)
    x = torch.randn(2, 4, 4, 3, 3)
    assert torch.equal(head(x), head(x, pre_logits=True)) and head(x).shape == (2, 4)
    with pytest.raises(ValueError, match="num_classes >= 0 and hidden >= 1, got -1"):
        InvariantHead(4, -1, hidden=8)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_mlp_computes_its_hidden_map_again_and_nothing_else(dropout):
    """Gradients, statistics and the random numbers are those of an ordinary pass, and no product is computed twice."""
    torch.manual_seed(0)
    mlp = GroupMLP("p4", 3, dropout=dropout).double()
    plain = copy.deepcopy(mlp)
    x = torch.randn(4, 3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (mlp, plain):
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            if module is mlp:
                out = module(x)
            else:
                hidden = nn.functional.dropout3d(module.norm1(module.fc1(x)).relu(), dropout)
                out = module.drop2(module.norm2(module.fc2(hidden)))
            x.grad = None
            out.sin().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
        results.append(
            [
                out,
                *grads,
                *module.norm1.buffers(),
                *module.norm2.buffers(),
                torch.rand(3),
                torch.tensor(counter.get_total_flops()),
            ]
        )
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_every_bank_is_built_once_in_a_step(monkeypatch):
    """Also that of the layer whose input is computed again in the backward pass."""
    built = []
    build = TurnedFilters._build
    monkeypatch.setattr(TurnedFilters, "_build", lambda self: built.append(self) or build(self))
    made = block("p4")
    made(torch.randn(2, 4, 4, 5, 5)).square().sum().backward()
    filters = [module for module in made.modules() if isinstance(module, TurnedFilters)]
    assert len(built) == len(filters) == len({id(module) for module in built})
