"""Parity with escnn, with copied weights, where escnn is installed (`make bench` installs it)."""

import sys
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from revit.conversion import convert_released
from revit.groups import Group
from revit.models import create_model
from revit.nn import GroupConv, LiftingConv

pytest.importorskip("escnn", reason="escnn is not installed: make bench runs these tests", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import escnn
    from escnn_reference import HierarchicalReference, Reference, gspace_of, regular_fields

pytestmark = pytest.mark.filterwarnings("ignore")
GROUPS = ["z2", "z2m", "p4", "p4m"]


def element_map(group):
    """Where our elements stand in escnn's regular representation, by comparing the matrices that act on the plane."""
    gspace = gspace_of(group)
    theirs = [torch.tensor(gspace.basespace_action(e)) for e in gspace.testing_elements]
    where = [next(i for i, t in enumerate(theirs) if torch.allclose(t, m, atol=1e-6)) for m in group.matrix]
    assert sorted(where) == list(range(group.order))
    return where


def escnn_conv(group, in_channels, out_channels, kernel_size, lifting, **options):
    gspace = gspace_of(group)
    fields = escnn.nn.FieldType(gspace, in_channels * [gspace.trivial_repr]) if lifting else regular_fields(gspace, in_channels)
    conv = escnn.nn.R2Conv(fields, regular_fields(gspace, out_channels), kernel_size, bias=False, **options)
    with torch.no_grad():
        conv.weights.normal_()
    return conv.eval()


def expanded(conv, group, in_channels, out_channels, lifting):
    """escnn's filter [O, G, I, (G,) K, K] in our order of elements."""
    where, order = element_map(group), group.order
    bank = conv.export().weight.detach()
    size = bank.shape[-1]
    bank = bank.view(out_channels, order, in_channels, *(() if lifting else (order,)), size, size)[:, where]
    return bank if lifting else bank[:, :, :, where]


@pytest.mark.parametrize("lifting", [True, False], ids=["lift", "group"])
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_exact_groups_copy_the_filter(name, kernel_size, lifting):
    """Our layer with escnn's filter of the identity gives escnn's output: its whole bank obeys our kernel constraint."""
    group = Group.parse(name)
    reference = escnn_conv(group, 2, 3, kernel_size, lifting, padding=kernel_size // 2)
    bank = expanded(reference, group, 2, 3, lifting)
    layer = (LiftingConv if lifting else GroupConv)(
        group, 2, 3, kernel_size, padding=kernel_size // 2, bias=False, filters="free"
    )
    with torch.no_grad():
        layer.weight.copy_(bank[:, 0])
        torch.testing.assert_close(layer.filters().view(bank.shape), bank, rtol=0, atol=2e-6)
        where = element_map(group)
        features = torch.randn(2, 2, *(() if lifting else (group.order,)), 9, 9)
        theirs_in = torch.empty_like(features)
        if lifting:
            theirs_in = features
        else:
            theirs_in[:, :, where] = features
            theirs_in = theirs_in.flatten(1, 2)
        theirs = reference(escnn.nn.GeometricTensor(theirs_in, reference.in_type)).tensor.unflatten(1, (3, group.order))
        torch.testing.assert_close(layer(features), theirs[:, :, where], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["p8", "p12", "p8m"])
@pytest.mark.parametrize("kernel_size", [3, 5, 7])
def test_steerable_filters_span_the_same_space(name, kernel_size):
    """escnn's filters are combinations of our functions, for every element at once, and there are as many of them."""
    group = Group.parse(name)
    reference = escnn_conv(group, 1, 2, kernel_size, lifting=True, padding=kernel_size // 2)
    bank = expanded(reference, group, 1, 2, lifting=True).double()  # [O, G, I, K, K]
    layer = LiftingConv(group, 1, 2, kernel_size, filters="steerable", bias=False).double()
    basis = layer.filters.basis[0]  # [K*K, P]
    assert reference.weights.numel() == layer.weight.numel()
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.lstsq(basis, bank[:, 0, 0].flatten(1).T).solution.T.unsqueeze(1))
        scale = bank.abs().max()
        torch.testing.assert_close(layer.filters().view(bank.shape) / scale, bank / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dims", "depths", "heads", "in_chans", "stride"),
    [("z2", 16, 4, 4, 1, 1), ("p4", 12, 4, 6, 1, 1), ("p8", 10, 3, 5, 1, 1), ("p4m", 12, 3, 6, 3, 2)],
)
def test_parameter_counts_are_those_of_the_reference(name, dims, depths, heads, in_chans, stride):
    options = {"dims": dims, "depths": depths, "num_heads": heads, "in_chans": in_chans, "stride": stride, "kernel_size": 5}
    ours = create_model("revit_small_paper", group=name, **options)
    theirs = Reference(name, **options)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def copy_conv(target, sources, group):
    """Copies the filters of escnn convolutions (one, or q, k and v) into a layer of ours."""
    lifting = isinstance(target, LiftingConv)
    out_channels = target.out_channels // len(sources)
    banks = [expanded(source, group, target.in_channels, out_channels, lifting)[:, 0] for source in sources]
    target.weight.copy_(torch.cat(banks).view(target.weight.shape))


def copy_norm(target, source):
    """escnn keeps one ordinary batch norm inside its own."""
    (inner,) = (m for m in source.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))
    target.load_state_dict(inner.state_dict())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_whole_model_with_copied_weights(name, stride):
    """Every weight of the escnn-built model copied into `revit_small_paper`: the same logits, at random statistics."""
    group = Group.parse(name)
    options = {"in_chans": 2, "dims": 6, "depths": 2, "num_heads": 3, "kernel_size": 5, "stride": stride}
    theirs = Reference(name, **options)
    theirs.train()(torch.randn(8, 2, 17, 17))  # statistics away from 0 and 1
    theirs.eval()
    ours = create_model("revit_small_paper", group=name, filters="free", **options).eval()
    with torch.no_grad():
        copy_conv(ours.stem[0].conv, [theirs.lift.conv], group)
        copy_norm(ours.stem[1], theirs.lift.bn)
        for mine, block in zip(ours.stages[0].blocks, theirs.blocks, strict=True):
            copy_conv(mine.attn.qkv.mix, [block.attn.to_q, block.attn.to_k, block.attn.to_v], group)
            copy_conv(mine.attn.proj, [block.attn.to_out], group)
            copy_conv(mine.mlp.fc1, [block.mlp.net[0]], group)
            copy_conv(mine.mlp.fc2, [block.mlp.net[4]], group)
            for norm, source in ((mine.norm1, block.norm1), (mine.norm2, block.norm2)):
                copy_norm(norm, source)
            copy_norm(mine.mlp.norm1, block.mlp.net[1])
            copy_norm(mine.mlp.norm2, block.mlp.net[5])
        ours.head.hidden[0].load_state_dict(theirs.head.fc1.state_dict())
        ours.head.hidden[1].load_state_dict(theirs.head.bn.state_dict())
        ours.head.fc.load_state_dict(theirs.head.fc2.state_dict())
        x = torch.randn(3, 2, 17, 17)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


SIZES = {
    "flat": {"in_chans": 2, "dims": 12, "depths": 2, "num_heads": 3, "kernel_size": 5, "stride": 2},
    "windowed": {"in_chans": 3, "dims": (4, 8), "depths": (1, 2), "num_heads": (1, 2), "kernel_size": 3, "window": 4},
}


class ExactPool(torch.nn.Module):
    """The max over the group in any precision: escnn's always gives float32."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x):
        scalars = escnn.nn.FieldType(x.type.gspace, len(x.type) * [x.type.gspace.trivial_repr])
        return escnn.nn.GeometricTensor(x.tensor.unflatten(1, (-1, self.order)).amax(2), scalars)


def trained_reference(kind, name):
    """An escnn-built model with the keys of the released code, with random weights and statistics; images for it.

    escnn draws weights by other means as well, so a seed does not fix them. A draw whose classifier is dead, with the same
    logits for all images, would show nothing: another one is taken.
    """
    for seed in range(20):
        torch.manual_seed(seed)
        theirs = (Reference if kind == "flat" else HierarchicalReference)(name, num_classes=10, **SIZES[kind])
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            images = torch.randn(4, SIZES[kind]["in_chans"], 32, 32)
            theirs.train()(images)
            alive = theirs.eval()(images).std(0).min() > 1e-4
        if alive:
            return theirs.train(), images
    raise AssertionError("every draw has the same logits for all images")


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["z2", "z2m", "p4", "p4m", "p8", "p12", "p16", "p8m"])
@pytest.mark.parametrize("kind", ["flat", "windowed"])
def test_conversion(kind, name, mode):
    """A state dict saved in either mode, converted without escnn: the logits of escnn in float32 and float64."""
    theirs, images = trained_reference(kind, name)
    with torch.no_grad():
        theirs.train(mode == "train")
    assert any(key.endswith(".filter") for key in theirs.state_dict()) == (mode == "eval")
    heads = SIZES[kind]["num_heads"]
    converted = convert_released(theirs.state_dict(), num_heads=heads, window_size=4)
    assert converted.arguments["group"] == name
    with torch.no_grad():
        expected = theirs.eval()(images)
        assert expected.std(0).min() > 1e-4
        torch.testing.assert_close(converted.model(images), expected, rtol=0, atol=1e-5)
        theirs = deepcopy(theirs).double()  # a copy, for all models of a process share the functions of escnn
        theirs.head.pool = ExactPool(Group.parse(name).order)
        expected = theirs(images.double())
        converted = convert_released(theirs.state_dict(), num_heads=heads, window_size=4)
        # escnn samples its functions in float32: this much of them is not on our functions.
        torch.testing.assert_close(converted.model(images.double()), expected, rtol=0, atol=2e-6)


def test_conversion_of_a_model_that_never_ran():
    theirs = Reference("p4", **SIZES["flat"])
    converted = convert_released(theirs.state_dict(), num_heads=3)  # with filters of zeros, which escnn has not filled yet
    images = torch.randn(2, 2, 17, 17)
    with torch.no_grad():
        torch.testing.assert_close(converted.model(images), theirs.eval()(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 7])
def test_conversion_of_other_kernels(kernel_size):
    theirs = Reference("p8", **{**SIZES["flat"], "kernel_size": kernel_size, "stride": 1}).train().eval()
    converted = convert_released(theirs.state_dict(), num_heads=3)
    assert converted.arguments["kernel_size"] == kernel_size
    images = torch.randn(2, 2, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(converted.model(images), theirs(images), rtol=0, atol=1e-5)
