"""RE-ResNet: ResNet itself on the trivial group, exactness on the others, and what the usual strides break."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from revit.actions import act_on_features
from revit.equivariance import equivariance_error
from revit.evaluation.complexity import count_macs, measured_macs
from revit.exactness import EquivarianceError
from revit.groups import Group
from revit.models import GCNN, create_model
from revit.models.resnet import LinearHead, OddPool, ResidualBlock
from tests.models.networks import assert_exact, count, errors_of_inexact, relative_errors, warmed

NARROW = {"in_chans": 2, "num_classes": 3, "dims": 2, "depths": (1, 2, 1, 1)}
PLAIN = {"group": "z2", "dims": 64}
RESNET18 = {"depths": (2, 2, 2, 2), "bottleneck": False}


def narrow(name, group, **options):
    return create_model(name, group=group, **{**NARROW, **options})


def test_parameter_counts():
    """The paper states 11M; on the trivial group, with its widths, the network is ResNet-50 or ResNet-18 to the parameter."""
    model = create_model("re_resnet")
    assert count(model) == 10_799_530 == pytest.approx(11e6, rel=0.05)
    assert model.group.name == "p4m" and model.num_classes == 1000 and model.dims == (15, 30, 60, 120)
    assert model.num_heads == (1, 1, 1, 1) and model.num_features == 480
    assert count(create_model("re_resnet_paper")) == 10_798_855
    assert count(create_model("re_resnet_small")) == 1_069_617
    assert count(create_model("re_resnet_paper", **PLAIN)) == 25_557_032
    assert count(create_model("re_resnet_paper", **PLAIN, **RESNET18)) == 11_689_512


@pytest.mark.parametrize(("options", "published"), [({}, 4.09e9), (RESNET18, 1.81e9)])
def test_published_cost(options, published):
    assert count_macs(create_model("re_resnet_paper", **PLAIN, **options), 224).total == pytest.approx(published, rel=5e-3)


@pytest.mark.parametrize("group", ["z2", "p4", "p4m"])
@pytest.mark.parametrize(("name", "size"), [("re_resnet", (96, 70)), ("re_resnet_small", (32, 32))])
def test_cost_by_formula_is_the_cost_counted(name, size, group):
    model = narrow(name, group)
    formula, counted = count_macs(model, size), measured_macs(model, torch.randn(2, 2, *size))
    assert formula.total == counted.total and formula.attention == counted.attention == 0


@pytest.mark.parametrize("group", ["z2", "z2m", "p4", "p4m"])
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("re_resnet", (224, 224), {"dims": 1, "depths": (1, 1, 1, 1)}),
        ("re_resnet", (96, 96), {}),
        ("re_resnet", (32, 32), {}),
        ("re_resnet", (101, 74), {}),
        ("re_resnet_small", (32, 32), {}),
        ("re_resnet_small", (96, 96), {"dims": 1}),
        ("re_resnet_small", (29, 38), {}),
        ("re_resnet_small", (96, 96), {"stride": 2, "bottleneck": True}),
    ],
)
def test_exact(name, size, options, group):
    """float64 errors of features and logits <= 1e-10 relative, also off the square and at odd sizes, in training too."""
    assert_exact(lambda: narrow(name, group, **options), group, [size], in_training=size)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_every_element_of_p4m(norm):
    model, x = warmed(narrow("re_resnet", "p4m", norm=norm), (45, 50))
    assert equivariance_error(model, x, "p4m", relative=True).max() <= 1e-10
    assert equivariance_error(model.forward_features, x, "p4m", relative=True).max() <= 1e-10


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
def test_usual_strides_are_not_exact(group):
    """The guard: the same test must fail with the usual strides at 96 pixels, and pass at 97, where they are exact."""
    errors, sides = errors_of_inexact(lambda: narrow("re_resnet_paper", group), group, 96)
    assert sides == ["96", "48", *(side for side in ("24", "12", "6") for _ in range(2))]  # each strided layer once
    assert min(errors.values()) > 1e-3, errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = warmed(narrow("re_resnet_paper", group), (97, 97))
        assert max(relative_errors(model, x, group, [1]).values()) <= 1e-10


def test_usual_strides_at_the_size_of_imagenet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, x = warmed(narrow("re_resnet_paper", "p4m", dims=1, depths=(1, 1, 1, 1)), (224, 224))
        errors = relative_errors(model, x, "p4m", [1])
    assert min(errors.values()) > 1e-3, errors


def test_p8_is_exact_for_quarter_turns():
    model, x = warmed(narrow("re_resnet", "p8"), (33, 33))
    errors = equivariance_error(model, x, "p8", relative=True)
    assert errors[::2].max() <= 1e-10 and errors[1::2].min() > 1e-3


def plain_weight(module):
    """The `conv2d` weight of a layer on the trivial group."""
    weight = getattr(module, "conv", module).weight
    return weight if weight.ndim == 4 else weight[:, :, 0]


def normed(norm, x):
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (45, 58)])
def test_against_plain_convolutions(bottleneck, size):
    """On the trivial group and with the usual strides the network is a ResNet, written with `F.conv2d`."""
    model, x = warmed(narrow("re_resnet_paper", "z2", bottleneck=bottleneck, num_classes=4), size)
    stem, *stages = model.layers
    expected = normed(stem.norm[0], F.conv2d(x, plain_weight(stem.conv), stride=2, padding=3)).relu()
    expected = F.max_pool2d(expected, 3, stride=2, padding=1)
    for i, stage in enumerate(stages):
        for j, block in enumerate(stage.blocks):
            stride = 2 if i > 0 and j == 0 else 1
            y = expected
            if bottleneck:
                y = normed(block.reduce[1][0], F.conv2d(y, plain_weight(block.reduce[0]))).relu()
            y = normed(block.norm[0], F.conv2d(y, plain_weight(block.conv), stride=stride, padding=1)).relu()
            y = normed(block.last[1], F.conv2d(y, plain_weight(block.last[0]), padding=0 if bottleneck else 1))
            if stride == 2 or y.shape != expected.shape:
                *_, conv, norm = block.shortcut
                expected = normed(norm, F.conv2d(expected, plain_weight(conv), stride=stride))
            expected = (expected + y).relu()
    pooled = expected.mean((-2, -1))
    torch.testing.assert_close(model.forward_features(x)[:, :, 0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(x), F.linear(pooled, model.head.fc.weight, model.head.fc.bias), rtol=0, atol=1e-12)


def test_the_exact_shortcut_is_a_mean_then_a_mixture():
    """Silence the branch: what is left is the shortcut, of 2 x 2 pixels each."""
    options = {"norm": "batch", "odd": False, "filters": "auto", "strict": True}
    block = ResidualBlock(Group.parse("z2"), 2, 3, stride=2, bottleneck=False, **options).double().eval()
    torch.nn.init.zeros_(block.last[1].weight)
    x = torch.randn(1, 2, 1, 6, 8, dtype=torch.float64)
    means = x[:, :, 0].unfold(-2, 2, 2).unfold(-2, 2, 2).mean((-2, -1))
    mixed = torch.einsum("oi,bihw->bohw", block.shortcut[1].weight[:, :, 0, 0, 0], means) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(block(x)[:, :, 0], mixed.relu(), rtol=0, atol=1e-12)


def test_a_block_adds_to_what_it_is_given():
    options = {"norm": "batch", "odd": False, "filters": "auto", "strict": True}
    for channels, bottleneck in ((3, False), (12, True)):
        block = ResidualBlock(Group.parse("p4"), channels, 3, stride=1, bottleneck=bottleneck, **options).eval()
        torch.nn.init.zeros_(block.last[1].weight)
        x = torch.randn(2, channels, 4, 5, 5)
        assert block.out_channels == channels and torch.equal(block(x), x.relu())


def test_the_odd_pool_is_the_usual_one():
    x = torch.randn(2, 3, 4, 9, 7)
    usual = F.max_pool2d(x.flatten(1, 2), 3, stride=2, padding=1).unflatten(1, (3, 4))
    pool = OddPool(Group.parse("p4"), strict=True)
    assert torch.equal(pool(x), usual) and pool.output_size(9, 7) == (5, 4)
    with pytest.raises(EquivarianceError, match="not p4 equivariant at height 8"):
        pool(torch.zeros(1, 3, 4, 8, 7))


def test_the_head_pools_the_group_then_space():
    head, x = LinearHead(5, 3), torch.randn(2, 5, 8, 4, 6)
    pooled = x.amax(2).mean((-2, -1))
    torch.testing.assert_close(head(x, pre_logits=True), pooled)
    torch.testing.assert_close(head(x), pooled @ head.fc.weight.T + head.fc.bias)
    torch.testing.assert_close(LinearHead(5, 0)(x), pooled)
    for g in range(8):
        torch.testing.assert_close(head(act_on_features(x, "p4m", g)), head(x))


@pytest.mark.parametrize(("group", "norm"), [("z2", "batch"), ("z2m", "layer"), ("p4m", "batch"), ("p8", "layer")])
@pytest.mark.parametrize("name", ["re_resnet", "re_resnet_small", "re_resnet_paper"])
def test_shapes_and_gradients(name, group, norm):
    model = narrow(name, group, norm=norm, dims=4)
    x = torch.randn(3, 2, 65, 65 if name == "re_resnet_paper" else 70)
    features = model.forward_features(x)
    fields = 32 if name == "re_resnet_small" else 128
    assert isinstance(model, GCNN) and features.shape[:3] == (3, fields, model.group.order) and model.num_features == fields
    assert model.forward_head(features, pre_logits=True).shape == (3, fields) and model.num_classes == 3
    F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@pytest.mark.parametrize(
    ("name", "size", "sides"),
    [
        ("re_resnet", 224, [56, 56, 28, 14, 7]),
        ("re_resnet", 225, [57, 57, 29, 15, 8]),
        ("re_resnet_small", 32, [32, 32, 16, 8, 4]),
        ("re_resnet_small", 28, [28, 28, 14, 7, 4]),
        ("re_resnet_paper", 225, [57, 57, 29, 15, 8]),
    ],
)
def test_named_features_are_the_stages(name, size, sides):
    model = narrow(name, "p4", dims=1, depths=(1, 1, 1, 1)).eval()
    with torch.no_grad():
        features = model.named_features(torch.randn(1, 2, size, size))
    maps = ["lift", "layers.1", "layers.2", "layers.3", "layers.4"]
    assert list(features) == [*maps, "pre_class", "logits"] and [features[key].shape[-1] for key in maps] == sides
    assert model.check_input_size(size) == {key: tuple(features[key].shape[-2:]) for key in maps}


def test_features_only():
    maps = create_model("re_resnet", group="p4", dims=2, features_only=True, out_indices=(1, 2, 3, 4))
    found = maps(torch.randn(1, 3, 64, 96))
    assert [m.shape for m in found] == [(1, 32, 16, 24), (1, 64, 8, 12), (1, 128, 4, 6), (1, 256, 2, 3)]
    assert maps.channels() == [32, 64, 128, 256] and maps.reduction() == [4, 8, 16, 32]
    pruned = create_model("re_resnet_small", group="p4", dims=2, features_only=True, out_indices=(0, 2))
    assert pruned.reduction() == [1, 2] and len(pruned.model.layers) == 3 and pruned.model.num_classes == 0
    assert [m.shape[1:] for m in pruned(torch.randn(1, 3, 9, 8))] == [(8, 9, 8), (16, 5, 4)]


def test_one_width_doubles_from_stage_to_stage():
    one, all_four = create_model("re_resnet_small", dims=3), create_model("re_resnet_small", dims=(3, 6, 12, 24))
    assert one.dims == all_four.dims == (3, 6, 12, 24) and count(one) == count(all_four)
    two = create_model("re_resnet_small", dims=3, depths=[1, 1])
    assert two.dims == (3, 6) and all(after == 2 * before for before, after in pairwise(one.dims))


def test_classifier_can_be_replaced():
    model, x = warmed(narrow("re_resnet_small", "p4"), (16, 16))
    assert model.get_classifier().out_features == 3
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model.num_classes == 5 and not model.head.training
    assert model.get_classifier().weight.dtype == torch.float64
    model.reset_classifier(0)
    assert model(x).shape == (2, 16) and isinstance(model.get_classifier(), torch.nn.Identity) and model.num_classes == 0
    assert equivariance_error(model, x, "p4", relative=True).max() < 1e-12


def test_weight_decay_spares_norms_and_biases():
    spared = narrow("re_resnet", "p4").no_weight_decay()
    assert {"layers.0.norm.0.weight", "layers.1.blocks.0.last.1.bias", "head.fc.bias"} <= spared
    assert not {"layers.0.conv.filters.weight", "layers.1.blocks.0.conv.filters.weight", "head.fc.weight"} & spared


def test_wrong_sizes_are_named():
    paper = narrow("re_resnet_paper", "p4m", strict=True)
    for size, layer, nearest in ((224, "lift", "193 and 225"), (227, "lift", "225 and 257"), (229, "layers.2", "225 and 257")):
        message = rf"^{layer}: a layer with .*Nearest exact input sizes of the model: {nearest}$"
        with pytest.raises(EquivarianceError, match=message):
            paper.check_input_size(size)
    with pytest.raises(EquivarianceError, match="not p4m equivariant at height 224"):
        paper(torch.zeros(1, 2, 224, 224))
    for name, least in (("re_resnet", 8), ("re_resnet_small", 2)):
        model = narrow(name, "p4").eval()
        assert model.min_input_size == least and model(torch.zeros(1, 2, least, least + 1)).shape == (1, 3)
        message = f"^images of {least - 1} x 99 are below the minimum of {least} x {least} of this model$"
        with pytest.raises(ValueError, match=message):
            model.check_input_size(least - 1, 99)
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(1, 2, least - 1, 99))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": (4, 8)}, r"the same number of stages is needed in dims=\(4, 8\), depths=\(3, 4, 6, 3\)"),
        ({"dims": 0}, r"dims must be whole numbers >= 1, got \[0, 0, 0, 0\]"),
        ({"depths": (1, 0)}, r"depths must be whole numbers >= 1, got \(1, 0\)"),
        ({"stride": 3}, "^the stem of a ResNet has stride 1, 2 or 4, got 3$"),
        ({"num_classes": -1}, "a head needs num_classes >= 0, got -1"),
        ({"in_chans": 0}, "in_channels must be a whole number >= 1, got 0"),
        ({"group": "p7q"}, "unknown group 'p7q'"),
        ({"norm": "group"}, "unknown norm 'group'; choose batch, layer"),
        ({"group": "p8", "filters": "free"}, "free filters turn by multiples of 90 degrees only"),
        ({"num_heads": 2}, "model 're_resnet': .*unexpected keyword argument 'num_heads'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_model("re_resnet", **options)
