"""The G-SA baselines: published sizes, exactness at the sizes they are used at, and their place among the models."""

import re

import pytest
import torch

from revit.evaluation.complexity import count_macs, measured_macs
from revit.models import create_model
from tests.models.networks import GENERATORS, count, relative_errors

NAMES = ["gsa_rotmnist", "gsa_cifar", "gsa_pcam"]
SIZES = {"gsa_rotmnist": (28, 28), "gsa_cifar": (32, 32), "gsa_pcam": (96, 96)}
OTHER_SIZES = {"gsa_rotmnist": (23, 22), "gsa_cifar": (9, 6), "gsa_pcam": (45, 42)}


def narrow(name, group, **options):
    return create_model(name, **{"group": group, "in_chans": 2, "num_classes": 3, "dims": 6, "num_heads": 1, **options})


@pytest.mark.parametrize(
    ("name", "group", "parameters"),
    [
        ("gsa_rotmnist", "z2", 44_368),
        ("gsa_rotmnist", "z2m", 44_388),
        ("gsa_rotmnist", "p4", 44_428),
        ("gsa_rotmnist", "p8", 44_508),
        ("gsa_rotmnist", "p4m", 44_508),
        ("gsa_rotmnist", "p12", 44_588),
        ("gsa_rotmnist", "p16", 44_668),
        ("gsa_cifar", "p4", 3_002_128),
        ("gsa_pcam", "p4", 207_034),
    ],
)
def test_published_parameter_counts(name, group, parameters):
    assert count(create_model(name, group=group)) == parameters


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
@pytest.mark.parametrize("name", NAMES)
def test_exact(name, group):
    """float64 errors of features and logits <= 1e-10 relative at the size of its dataset; off the square in training mode."""
    for size in [SIZES[name], OTHER_SIZES[name]]:
        model = narrow(name, group, pool_drop_rate=0.0, input_drop_rate=0.0).double()
        x = torch.randn(1, 2, *size, dtype=torch.float64)
        with torch.no_grad():
            errors = relative_errors(model.train(size == OTHER_SIZES[name]), x, group, GENERATORS[group])
            assert max(errors.values()) <= 1e-10, (size, errors)


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_global_attention_is_exact(group):
    model = narrow("gsa_cifar", group, neighbourhood="global").double().eval()
    with torch.no_grad():
        errors = relative_errors(model, torch.randn(1, 2, 8, 9, dtype=torch.float64), group, GENERATORS[group])
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("name", NAMES)
def test_sizes_after_each_layer(name):
    """`check_input_size` tells what the maps are, down to the smallest image that leaves a pixel."""
    model = narrow(name, "p4")
    for size in (SIZES[name], OTHER_SIZES[name], (model.min_input_size, model.min_input_size)):
        with torch.no_grad():
            features = model.eval().named_features(torch.randn(1, 2, *size))
        told = model.check_input_size(*size)
        assert told == {layer: tuple(features[layer].shape[-2:]) for layer in told}
        assert min(min(sides) for sides in told.values()) >= 1
    least = model.min_input_size - 1
    with pytest.raises(ValueError, match=f"below the minimum of {least + 1} x {least + 1}"):
        model.check_input_size(least)


def test_maps_of_the_published_digits_network():
    sizes = create_model("gsa_rotmnist").check_input_size(28)
    assert [sides[0] for sides in sizes.values()] == [28, 24, 12, 8, 6, 4]


@pytest.mark.parametrize("name", NAMES)
def test_products_by_formula_and_by_torch(name):
    model = narrow(name, "p4")
    size = OTHER_SIZES[name]
    formula, counted = count_macs(model, size), measured_macs(model, torch.randn(1, 2, *size))
    assert (formula.convolution, formula.attention) == (counted.convolution, counted.attention)


def test_head_can_be_replaced_and_removed():
    model = narrow("gsa_rotmnist", "p4")
    x = torch.randn(2, 2, 28, 28)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.get_classifier().out_channels == 7
    model.reset_classifier(0)
    assert model.num_classes == 0 and model(x).shape == (2, model.num_features)


def test_features_only():
    model = create_model("gsa_rotmnist", group="p4", dims=6, num_heads=1, features_only=True, out_indices=[0, 2])
    maps = model(torch.randn(1, 1, 28, 28))
    assert [list(map_.shape) for map_ in maps] == [[1, 24, 28, 28], [1, 24, 12, 12]] and model.reduction() == [1, 2]


def test_dropout_is_off_in_evaluation():
    model = narrow("gsa_cifar", "p4", drop_rate=0.5, pool_drop_rate=0.5, input_drop_rate=0.5)
    x = torch.randn(2, 2, 9, 9)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_windows_and_even_neighbourhoods_are_refused():
    message = "unknown neighbourhood 'window' for relative positions; choose local, global"
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model("gsa_rotmnist", neighbourhood="window")
    with pytest.raises(ValueError, match="window_size must be odd and >= 1 for local attention, got 4"):
        create_model("gsa_rotmnist", window_size=4)


@pytest.mark.parametrize("dims", [7, 4])
def test_widths_that_cannot_be_split_are_named(dims):
    message = f"attention has half of the fields as keys, of three parts: dims must be even and >= 6, got {dims}"
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model("gsa_rotmnist", dims=dims)
