"""The G-CNN baselines: published sizes, exactness, and what the published strides break."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from revit.actions import act_on_features, act_on_plane
from revit.equivariance import equivariance_error
from revit.exactness import EquivarianceError
from revit.groups import Group
from revit.models import GCNN, create_model
from revit.models.gcnn import HalvingConv, HalvingPool
from tests.models.networks import assert_exact, assert_shapes_and_gradients, count, errors_of_inexact, relative_errors, warmed

NAMES = ["gcnn_rotmnist", "gcnn_cifar", "gcnn_pcam"]
SIZES = {"gcnn_rotmnist": (28, 32, 96), "gcnn_cifar": (28, 32, 96), "gcnn_pcam": (96,)}
ODD_SIZES = {"gcnn_rotmnist": (31, 29), "gcnn_cifar": (13, 30), "gcnn_pcam": (67, 70)}


def narrow(name, group, **options):
    return create_model(name, **{"group": group, "in_chans": 2, "num_classes": 3, "dims": 3, **options})


@pytest.mark.parametrize(
    ("name", "group", "dims", "parameters"),
    [
        ("gcnn_rotmnist", "z2", 20, 21_750),
        ("gcnn_rotmnist", "p4", 10, 24_610),
        ("gcnn_rotmnist", "p4", 19, 77_539),
        ("gcnn_rotmnist", "p8", 13, 77_753),
        ("gcnn_cifar", "z2", 96, 1_370_996),
        ("gcnn_cifar", "p4", 48, 1_370_372),
        ("gcnn_cifar", "p4m", 32, 1_219_252),
        ("gcnn_cifar", "z2m", (68, 136), 1_375_048),
        ("gcnn_cifar_paper", "p4m", 32, 1_219_252),
        ("gcnn_pcam", "z2", 26, 130_598),
        ("gcnn_pcam", "p4", 13, 129_649),
        ("gcnn_pcam", "p4m", 9, 124_209),
    ],
)
def test_published_parameter_counts(name, group, dims, parameters):
    assert count(create_model(name, group=group, dims=dims)) == parameters


def test_default_sizes_are_the_p4_networks():
    assert [count(create_model(name)) for name in NAMES] == [24_610, 1_370_372, 129_649]
    assert count(create_model("gcnn_rotmnist", group="p8", dims=13, filters="rbf")) == 73_593


@pytest.mark.parametrize("group", ["z2", "z2m", "p4", "p4m"])
@pytest.mark.parametrize("name", NAMES)
def test_exact(name, group):
    """float64 errors of features and logits <= 1e-10 relative; off the square and at odd sizes, in training too."""
    sizes = [*((side, side) for side in SIZES[name]), ODD_SIZES[name]]
    assert_exact(lambda: narrow(name, group, dims=2), group, sizes, in_training=ODD_SIZES[name])


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
def test_published_strides_are_not_exact(group):
    """The guard: the same test must fail with the published strides at 32 pixels, and pass at 33, where they are exact."""
    errors, sides = errors_of_inexact(lambda: narrow("gcnn_cifar_paper", group), group, 32)
    assert sides == ["32", "16"]  # each strided layer once
    assert errors["lift"] < 1e-10 and errors["pre_class"] > 1e-3 and errors["logits"] > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = warmed(narrow("gcnn_cifar_paper", group), (33, 33))
        assert max(relative_errors(model, x, group, [1]).values()) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_p8_is_exact_for_quarter_turns(name):
    model, x = warmed(narrow(name, "p8"), (SIZES[name][0],) * 2)
    errors = equivariance_error(model, x, "p8", relative=True)
    assert errors[::2].max() < 1e-10 and errors[1::2].min() > 1e-3


@pytest.mark.parametrize(("group", "norm"), [("z2", "batch"), ("z2m", "layer"), ("p4m", "batch"), ("p8", "layer")])
@pytest.mark.parametrize("name", [*NAMES, "gcnn_cifar_paper"])
def test_shapes_and_gradients(name, group, norm):
    model = narrow(name, group, norm=norm, dims=4).eval()  # in training a batch norm takes the gradient of the bias before it
    assert_shapes_and_gradients(model, (65, 65) if name == "gcnn_pcam" else (29, 29))


@pytest.mark.parametrize(
    ("name", "size", "sides"),
    [
        ("gcnn_rotmnist", 28, [26, 12, 10, 8, 6, 4]),
        ("gcnn_cifar", 32, [32, 32, 16, 16, 16, 8, 8, 8]),
        ("gcnn_pcam", 96, [94, 92, 46, 44, 22, 20, 10, 8, 4, 2, 2]),
    ],
)
def test_named_features_have_the_published_sizes(name, size, sides):
    model, x = warmed(narrow(name, "p4"), (size, size))
    with torch.no_grad():
        features = model.named_features(x)
    maps = ["lift", *(f"layers.{i}" for i in range(1, len(sides)))]
    assert list(features) == [*maps, "pre_class", "logits"]
    assert [features[key].shape[-1] for key in maps] == sides
    assert model.check_input_size(size) == {key: tuple(features[key].shape[-2:]) for key in maps}
    assert features["pre_class"] is features[maps[-1]] and torch.equal(features["logits"], model(x))
    turned = model.named_features(act_on_plane(x, "p4", 1).contiguous())
    for key in maps:
        torch.testing.assert_close(turned[key], act_on_features(features[key], "p4", 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_foretold_are_those_computed(name):
    model, x = warmed(narrow(name, "p4"), ODD_SIZES[name])
    features = model.named_features(x)
    assert all(tuple(features[key].shape[-2:]) == size for key, size in model.check_input_size(*ODD_SIZES[name]).items())


def test_seven_layers_against_plain_convolutions():
    """With z2 the network is the one that Cohen and Welling call Z2CNN, written with `F.conv2d`."""
    model, x = warmed(narrow("gcnn_rotmnist", "z2"), (28, 28))
    expected = x
    for i, layer in enumerate(model.layers):
        weight = layer.conv.weight if i == 0 else layer.conv.weight[:, :, 0]
        expected = F.conv2d(expected, weight, layer.conv.bias)
        norm = layer.norm[0]
        expected = F.batch_norm(expected, norm.running_mean, norm.running_var, norm.weight, norm.bias).relu()
        expected = F.max_pool2d(expected, 2) if i == 1 else expected
    top = model.head.fc
    expected = F.conv2d(expected, top.weight[:, :, 0], top.bias).amax((-2, -1))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_halving_convolution():
    """Published: conv2d with stride 2. Exact: the same after a mean over pairs, of the same size, and no mean at odd sizes."""
    options = {"bias": False, "filters": "free", "strict": False}
    exact, odd = (HalvingConv(Group.parse("z2"), 2, 3, odd=odd, **options).double() for odd in (False, True))
    odd.load_state_dict(exact.state_dict())
    x = torch.randn(2, 2, 1, 8, 7, dtype=torch.float64)
    weight = exact.conv.weight[:, :, 0]
    published = F.conv2d(x[:, :, 0], weight, stride=2, padding=1)
    torch.testing.assert_close(odd(x)[:, :, 0], published, rtol=0, atol=1e-13)
    pairs = (x[:, :, 0, 1:] + x[:, :, 0, :-1]) / 2
    torch.testing.assert_close(exact(x)[:, :, 0], F.conv2d(pairs, weight, stride=2, padding=1), rtol=0, atol=1e-13)
    assert exact(x).shape == odd(x).shape == (2, 3, 1, 4, 4)


def test_halving_pool_is_the_usual_one_at_even_sizes():
    x = torch.randn(2, 3, 4, 6, 8)
    for mode, usual in (("max", F.max_pool2d), ("mean", F.avg_pool2d)):
        torch.testing.assert_close(HalvingPool(mode)(x), usual(x.flatten(1, 2), 2).unflatten(1, (3, 4)))
        assert HalvingPool(mode)(x[..., :-1]).shape == (2, 3, 4, 3, 4)


def test_a_dense_block_keeps_what_it_was_given():
    model, x = warmed(narrow("gcnn_pcam", "p4"), (65, 65))
    features = model.named_features(x)
    assert torch.equal(features["layers.1"][:, 3:], features["lift"][..., 1:-1, 1:-1])
    assert features["layers.1"].shape[1] == 6 and features["pre_class"].shape[1] == 18


def test_the_head_pools_space_and_group():
    for name, space, group in (
        ("gcnn_rotmnist", torch.amax, torch.amax),
        ("gcnn_cifar", torch.mean, torch.amax),
        ("gcnn_cifar_paper", torch.mean, torch.mean),
    ):
        model = narrow(name, "p4").eval()
        x = torch.randn(2, model.num_features, 4, 6, 6)
        classes = model.head.norm(model.get_classifier()(x))  # [B, 3, 4, H, W]
        torch.testing.assert_close(model.forward_head(x), group(space(classes, dim=(-2, -1)), dim=-1))
        torch.testing.assert_close(model.forward_head(x, pre_logits=True), group(space(x, dim=(-2, -1)), dim=-1))


def test_dropout_follows_the_published_layers():
    def rates(name, **options):
        layers = narrow(name, "p4", drop_rate=0.3, **options).layers
        kinds = {type(layer.drop) for layer in layers} - {torch.nn.Identity}
        return [i for i, layer in enumerate(layers, start=1) if getattr(layer.drop, "p", 0) == 0.3], kinds

    assert rates("gcnn_rotmnist") == ([1, 3, 4, 5, 6], {torch.nn.Dropout3d})
    assert rates("gcnn_cifar", elementwise_dropout=True) == ([3, 6], {torch.nn.Dropout})


def test_classifier_can_be_replaced():
    model, x = warmed(narrow("gcnn_rotmnist", "p4"), (28, 28))
    assert model.get_classifier().out_channels == 3
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model.num_classes == 5 and not model.head.training
    assert isinstance(model, GCNN) and model.get_classifier().weight.dtype == torch.float64
    model.reset_classifier(0)
    assert model(x).shape == (2, 3) and isinstance(model.get_classifier(), torch.nn.Identity)
    assert equivariance_error(model, x, "p4", relative=True).max() < 1e-12


def test_weight_decay_spares_norms_and_biases():
    spared = narrow("gcnn_rotmnist", "z2").no_weight_decay()
    assert {"layers.0.conv.bias", "layers.0.norm.0.weight", "head.fc.bias"} <= spared
    assert "layers.0.conv.filters.weight" not in spared


def test_features_only():
    maps = create_model("gcnn_cifar", group="p4", dims=3, features_only=True, out_indices=(0, 5))
    assert [m.shape for m in maps(torch.randn(1, 3, 16, 16))] == [(1, 12, 16, 16), (1, 24, 4, 4)]
    assert maps.channels() == [12, 24] and maps.reduction() == [1, 4] and len(maps.model.layers) == 6


def test_wrong_sizes_are_named():
    paper = create_model("gcnn_cifar_paper", group="p4m", strict=True, dims=2)
    with pytest.raises(EquivarianceError, match=r"layers.2: .* height 32.*Nearest exact input sizes of the model: 29 and 33$"):
        paper.check_input_size(32)
    with pytest.raises(EquivarianceError, match="model: height 33, width 29 and 33$"):
        paper.check_input_size(33, 32)
    for name, least in (("gcnn_rotmnist", 27), ("gcnn_cifar", 4), ("gcnn_pcam", 65)):
        model = narrow(name, "p4").eval()
        assert model.min_input_size == least and model(torch.zeros(1, 2, least, least)).shape == (1, 3)
        message = f"images of {least - 1} x 99 are below the minimum of {least} x {least} of this model"
        for check in (lambda model=model, s=least - 1: model.check_input_size(s, 99),
                      lambda model=model, s=least - 1: model(torch.zeros(1, 2, s, 99))):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                check()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gcnn_rotmnist", {"dims": (4, 8)}, r"this network has 1 width, got dims=\(4, 8\)"),
        ("gcnn_cifar", {"dims": (4, 8, 8)}, r"this network has 2 widths, got dims=\(4, 8, 8\)"),
        ("gcnn_cifar", {"dims": 0}, r"dims must be whole numbers >= 1, got \(0, 0\)"),
        ("gcnn_pcam", {"dims": "9"}, "dims must be whole numbers >= 1, got '9'"),
        ("gcnn_pcam", {"num_classes": -1}, "a head needs num_classes >= 0, got -1"),
        ("gcnn_pcam", {"depths": 3}, "model 'gcnn_pcam': .*unexpected keyword argument 'depths'"),
        ("gcnn_cifar", {"group_pool": "sum"}, "unknown group pooling 'sum'; choose max, mean"),
        ("gcnn_cifar", {"group": "p7q"}, "unknown group 'p7q'"),
        ("gcnn_rotmnist", {"group": "p8", "filters": "free"}, "free filters turn by multiples of 90 degrees only"),
        ("gcnn_rotmnist", {"drop_rate": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("gcnn_rotmnist", {"norm": "group"}, "unknown norm 'group'; choose batch, layer"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)
