"""The attentive G-CNNs: published sizes, exactness, cost, and that attention is in every convolution."""

import copy
import re

import pytest
import torch

from revit.evaluation.complexity import count_macs, measured_macs
from revit.models import GCNN, create_model
from revit.models.attentive_gcnn import PCAM_SPATIAL
from revit.models.budget import match_parameters
from revit.nn.attentive import AttentiveConv, FeatureAttentiveConv
from tests.models.networks import assert_exact, assert_shapes_and_gradients, count, relative_errors, warmed

ALPHA, ALPHA_F = "attentive_gcnn_rotmnist", "attentive_gcnn_pcam"
NAMES = [ALPHA, ALPHA_F]
SIZES = {ALPHA: ((28, 28), (31, 29)), ALPHA_F: ((96, 96), (67, 70))}


def narrow(name, group, **options):
    return create_model(name, **{"group": group, "in_chans": 2, "num_classes": 3, "dims": 2, **options})


@pytest.mark.parametrize(
    ("name", "options", "plain", "parameters", "published"),
    [
        (ALPHA, {"group": "p4", "dims": 10}, "gcnn_rotmnist", 73_130, 73.1e3),
        (ALPHA_F, {"group": "p4", "dims": 13}, "gcnn_pcam", 140_453, 140.45e3),
        (ALPHA_F, {"group": "p4m", "dims": 9}, "gcnn_pcam", 141_221, 141.22e3),
    ],
)
def test_published_parameter_counts(name, options, plain, parameters, published):
    """Those of the plain network and of the attention, which are counted here from the description of the layers."""
    order, width = (4 if options["group"] == "p4" else 8), options["dims"]
    if name == ALPHA:
        first = 10 * (1 * 1 + 1 * 1) + 10 * 2 * 7**2  # two matrices and two filters for each of ten output fields
        attention = first + 6 * 10 * order * (5 * 10 + 10 * 5 + 2 * 7**2)
    else:
        fields = width * (1 + 2 + 3 + 4 + 2 + 3 + 4 + 5 + 5 + 6)  # blocks, transitions, last block, classifier
        attention = 3 * 3 + 3 * 3 + 2 * 7**2 + order * (2 * 2 * fields + 2 * (8 * 7**2 + 5**2 + 3**2))
    model = create_model(name, **options)
    assert count(model) == count(create_model(plain, **options)) + attention == parameters
    assert count(model) == pytest.approx(published, rel=1e-3)


def test_default_sizes_are_the_p4_networks():
    assert [count(create_model(name)) for name in NAMES] == [73_130, 140_453]


@pytest.mark.parametrize("group", ["z2", "z2m", "p4", "p4m"])
@pytest.mark.parametrize("name", NAMES)
def test_exact(name, group):
    """float64 errors of features and logits <= 1e-10 relative; off the square and at odd sizes, in training too."""
    assert_exact(lambda: narrow(name, group), group, SIZES[name], in_training=SIZES[name][1])


@pytest.mark.parametrize("name", NAMES)
def test_p8_is_exact_for_quarter_turns(name):
    model, x = warmed(narrow(name, "p8"), (27, 27) if name == ALPHA else (65, 65))
    with torch.no_grad():
        assert max(relative_errors(model, x, "p8", [2]).values()) <= 1e-10
        assert max(relative_errors(model, x, "p8", [1]).values()) > 1e-3


def test_every_convolution_attends():
    model = narrow(ALPHA, "p4", dims=6)
    convs = [layer.conv for layer in model.layers] + [model.get_classifier()]
    assert len(convs) == 7 and all(isinstance(conv, AttentiveConv) for conv in convs)
    assert [(conv.hidden, conv.kernel_size) for conv in convs] == [(2, 7)] + [(3, 7)] * 6
    model = narrow(ALPHA_F, "p4", dims=5)
    convs = [layer.conv for layer in model.layers if hasattr(layer, "conv")] + [model.get_classifier()]
    assert len(convs) == 11 and all(isinstance(conv, FeatureAttentiveConv) for conv in convs)
    seen = [conv.spatial.conv.sampling for conv in convs]
    assert [(s.kernel_size, s.dilation) for s in seen] == list(PCAM_SPATIAL)
    assert [s.padding for s in seen] == [12, 12, 12, 12, 12, 9, 9, 6, 3, 2, 1]
    assert [conv.channel.fc1.out_channels for conv in convs] == [2] * 11


@pytest.mark.parametrize(("group", "norm"), [("z2", "batch"), ("p4m", "layer"), ("p8", "batch")])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_gradients(name, group, norm):
    model = narrow(name, group, norm=norm, dims=4).eval()
    assert_shapes_and_gradients(model, (65, 65) if name == ALPHA_F else (27, 27))


@pytest.mark.parametrize(
    ("name", "size", "sides"),
    [(ALPHA, 28, [26, 12, 10, 8, 6, 4]), (ALPHA_F, 96, [94, 92, 46, 44, 22, 20, 10, 8, 4, 2, 2])],
)
def test_named_features_have_the_published_sizes(name, size, sides):
    model, x = warmed(narrow(name, "p4"), (size, size))
    with torch.no_grad():
        features = model.named_features(x)
    maps = ["lift", *(f"layers.{i}" for i in range(1, len(sides)))]
    assert list(features) == [*maps, "pre_class", "logits"]
    assert [features[key].shape[-1] for key in maps] == sides
    assert model.check_input_size(size) == {key: tuple(features[key].shape[-2:]) for key in maps}


@pytest.mark.parametrize("group", ["z2", "p4m"])
@pytest.mark.parametrize("name", NAMES)
def test_formula_is_what_torch_counts(name, group):
    model = narrow(name, group, dims=3).eval()
    size = (31, 29) if name == ALPHA else (67, 70)
    found = count_macs(model, size)
    assert found.total == measured_macs(model, torch.randn(2, 2, *size)).total and found.attention == 0


def test_dropout_follows_the_published_layers():
    layers = narrow(ALPHA, "p4", drop_rate=0.3, elementwise_dropout=True).layers
    assert [i for i, layer in enumerate(layers, start=1) if isinstance(layer.drop, torch.nn.Dropout)] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("name", NAMES)
def test_classifier_can_be_replaced(name):
    model, x = warmed(narrow(name, "p4"), (27, 27) if name == ALPHA else (65, 65))
    attentive = type(model.get_classifier())
    assert isinstance(model, GCNN) and attentive in (AttentiveConv, FeatureAttentiveConv)
    copied = copy.deepcopy(model)
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model.num_classes == 5 and isinstance(model.get_classifier(), attentive)
    assert model.get_classifier().weight.dtype == torch.float64 and not model.head.training
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features) and isinstance(model.get_classifier(), torch.nn.Identity)
    assert copied.num_classes == 3 and copied(x).shape == (2, 3)
    assert not [key for key in copied.no_weight_decay() if not re.search(r"norm|bias", key)]


def test_features_only_and_parameter_budgets():
    maps = create_model(ALPHA, group="p4", dims=3, features_only=True, out_indices=(0, 2))
    assert [m.shape for m in maps(torch.randn(1, 1, 28, 28))] == [(1, 12, 26, 26), (1, 12, 10, 10)]
    assert match_parameters(lambda dims: create_model(ALPHA, dims=dims), 10, 1, 73_130) == (10, 73_130)
    assert match_parameters(lambda dims: create_model(ALPHA_F, dims=dims), 13, 1, 9_000)[0] == 2
    assert count(create_model(ALPHA, dims=1)) > 0


def test_weights_go_round(tmp_path):
    model, x = warmed(narrow(ALPHA, "p4"), (27, 27))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = narrow(ALPHA, "p4").double().eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (ALPHA, {"dims": (4, 8)}, "this network has 1 width, got dims=(4, 8)"),
        (ALPHA_F, {"dims": 0}, "dims must be whole numbers >= 1, got 0"),
        (ALPHA_F, {"num_classes": -1}, "a head needs num_classes >= 0, got -1"),
        (ALPHA_F, {"drop_rate": 0.3}, "model 'attentive_gcnn_pcam': attentive_gcnn_pcam() got an unexpected keyword"),
        (ALPHA, {"group": "p8", "filters": "free"}, "free filters turn by multiples of 90 degrees only"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model(name, **options)


@pytest.mark.parametrize(("name", "least"), [(ALPHA, 27), (ALPHA_F, 65)])
def test_small_images_are_refused(name, least):
    model = narrow(name, "p4").eval()
    assert model.min_input_size == least
    with pytest.raises(ValueError, match=f"images of {least - 1} x 99 are below the minimum of {least} x {least}"):
        model(torch.zeros(1, 2, least - 1, 99))
