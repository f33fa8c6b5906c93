"""deploy(): the same function, nothing but plain layers, for every family of models."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import revit
from revit.deployment import folding
from revit.deployment.layers import FieldAffine, PlainConv, PlainFourier
from revit.evaluation import audit_model
from revit.evaluation.complexity import count_macs
from revit.models import create_model
from revit.nn import DropPath, GroupConv, GroupLinear, RelativeSelfAttention
from revit.nn.filter_bank import TurnedFilters
from tests.models.networks import GENERATORS, relative_errors

DROPS = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}
FLAT = {"group": "p4", "in_chans": 1, "dims": 4, "depths": 2, **DROPS}
HIERARCHY = {"group": "p4", "dims": (2, 4, 4, 4), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "num_classes": 5, **DROPS}
CASES = {
    "flat": ("revit_tiny", FLAT, 28),
    "flat p4m": ("revit_tiny", {**FLAT, "group": "p4m", "num_heads": 1, "depths": 1, "kernel_size": 3}, 28),
    "layer norm": ("revit_tiny", {**FLAT, "norm": "layer", "neighbourhood": "local", "window_size": 3}, 14),
    "1x1 projection": ("revit_tiny", {**FLAT, "kernel_size": 1, "attention": "spatial"}, 14),
    "full projection": ("revit_tiny", {**FLAT, "projection": "full", "attention": "per_element"}, 14),
    "released": ("revit_tiny_paper", {**FLAT, "num_heads": 2}, 29),
    "hierarchical": ("revit_hier_tiny", HIERARCHY, 56),
    "gcnn": ("gcnn_rotmnist", {"group": "p4", "dims": 3, "drop_rate": 0.1}, 28),
    "gcnn with biases": ("gcnn_rotmnist", {"group": "z2", "dims": 3}, 28),
    "allcnn": ("gcnn_cifar", {"group": "p4m", "dims": 2, "drop_rate": 0.1}, 16),
    "densenet": ("gcnn_pcam", {"group": "p4", "dims": 2}, 66),
    "attentive": ("attentive_gcnn_rotmnist", {"group": "p4", "dims": 2}, 28),
    "attentive densenet": ("attentive_gcnn_pcam", {"group": "p4", "dims": 2}, 66),
    "gsa": ("gsa_rotmnist", {"group": "p4", "dims": 6, "num_heads": 2, "drop_rate": 0.1, "input_drop_rate": 0.1}, 22),
    "gsa global": ("gsa_cifar", {"group": "z2", "dims": 6, "num_heads": 1, "neighbourhood": "global"}, 8),
    "re_resnet": ("re_resnet", {"group": "p4", "dims": 2, "depths": (1, 1, 2, 1), "num_classes": 5}, 48),
    "re_resnet odd": ("re_resnet_paper", {"group": "p4", "dims": 1, "depths": (1, 1, 1, 1), "num_classes": 5}, 65),
    "re_resnet small": ("re_resnet_small", {"group": "p4m", "dims": 2, "depths": (1, 1, 1, 1)}, 16),
    "vit": ("vit_tiny", {"in_chans": 1, "depths": 2, **DROPS}, 28),
    "cvt": ("cvt_tiny", {"in_chans": 1, **DROPS}, 28),
}
ON_A_GROUP = [case for case, (_, options, _) in CASES.items() if options.get("group", "z2") != "z2"]


def randomised(model):
    """Norms with any statistics, scales and shifts, as after training: fresh ones would hide what is folded wrongly."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("scale" in name or name.endswith("weight")):
                parameter.uniform_(0.3, 1.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.3, generator=generator)
    return model


def build(case, dtype=torch.float64):
    name, options, size = CASES[case]
    torch.manual_seed(0)
    model = randomised(create_model(name, **options)).to(dtype).eval()
    return model, torch.randn(2, model.in_chans, size, size, dtype=dtype)


def difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def largest_difference(model, plain, x):
    with torch.no_grad():
        expected, found = model.named_features(x), plain.named_features(x)
    assert list(expected) == list(found)
    return max(difference(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", CASES)
def test_deployed_models_give_the_same(case):
    model, x = build(case)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model.deploy()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters()) and model.training
    assert largest_difference(model.eval(), plain, x) <= 1e-10
    assert not any(p.requires_grad for p in plain.parameters()) and not any(m.training for m in plain.modules())
    with torch.no_grad():
        expected = plain(x)
        assert torch.equal(revit.deploy(plain)(x), expected), "deployed again"
        assert torch.equal(plain.train()(x), expected), "no part has a mode"
    assert plain.check_input_size(*x.shape[-2:]) == model.check_input_size(*x.shape[-2:])
    revit.nn.set_algorithm(model, "dense")
    counted, expected = count_macs(plain.eval(), x.shape[-1]), count_macs(model, x.shape[-1])
    assert counted.attention == expected.attention
    if not any(isinstance(module, RelativeSelfAttention) for module in model.modules()):  # encodings are no longer computed
        assert counted.convolution == expected.convolution


@pytest.mark.parametrize("case", ON_A_GROUP)
def test_deployed_models_turn_with_the_image(case):
    model, x = build(case)
    plain = model.deploy()
    with torch.no_grad():
        errors = relative_errors(plain, x, plain.group, GENERATORS[plain.group.name])
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("case", CASES)
def test_only_plain_layers_are_left(case):
    model, _ = build(case)
    plain = model.deploy()
    gone = (TurnedFilters, _BatchNorm, _DropoutNd, DropPath, GroupConv, GroupLinear)
    assert not [name for name, module in plain.named_modules() if isinstance(module, gone)]
    assert not any("TurnedFilters" in repr(value) for module in plain.modules() for value in vars(module).values())
    tables = [name for name, buffer in plain.named_buffers() if not name.endswith("encoding_of")]
    assert tables == []


@pytest.mark.parametrize("attention", ["spatial", "per_element", "joint"])
def test_a_deployed_model_has_the_same_gradient_of_an_image(attention):
    """What saliency maps need: nothing in a deployed model takes a path that only training has."""
    torch.manual_seed(0)
    options = FLAT | {"dims": 12, "num_heads": 1, "attention": attention, "neighbourhood": "global"}
    model = randomised(create_model("revit_tiny", **options)).double().eval()
    x = torch.randn(2, 1, 14, 14, dtype=torch.float64, requires_grad=True)
    expected, found = (torch.autograd.grad(net(x).square().sum(), x)[0] for net in (model, model.deploy()))
    assert difference(found, expected) <= 1e-10


@pytest.mark.parametrize("case", ["flat", "hierarchical", "gcnn", "attentive densenet", "gsa", "re_resnet", "cvt"])
def test_float32_models_give_the_same(case):
    model, x = build(case, torch.float32)
    assert largest_difference(model, model.deploy(), x) <= 1e-5


def test_norms_are_folded_wherever_that_is_exact():
    """What is left stands before a padded convolution of more than one pixel, before a ReLU, or after attention."""
    left = {case: sum(isinstance(m, FieldAffine) for m in build(case)[0].deploy().modules()) for case in CASES}
    blocks = {"flat": 2, "flat p4m": 1, "full projection": 2, "released": 2, "hierarchical": 4}
    assert left == {**dict.fromkeys(CASES, 0), **blocks, "densenet": 10, "attentive": 6, "attentive densenet": 10}


@pytest.mark.parametrize("case", ["flat", "gcnn", "re_resnet", "1x1 projection", "cvt"])
def test_these_tests_see_broken_folding(case, monkeypatch):
    """A norm whose shift is lost, and one whose scale is."""
    model, x = build(case)
    right = folding.affine_of
    monkeypatch.setattr(folding, "affine_of", lambda norm: (right(norm)[0], 0 * right(norm)[1]))
    assert largest_difference(model, model.deploy(), x) > 1e-3
    monkeypatch.setattr(folding, "affine_of", lambda norm: (torch.ones_like(right(norm)[0]), right(norm)[1]))
    assert largest_difference(model, model.deploy(), x) > 1e-3


@pytest.mark.parametrize("group", ["p4", "p4m", "p8"])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_fixed_to_fourier_stay_so(group, bias):
    group = revit.Group.parse(group)
    layers = [GroupLinear(group, 3, 5, bias=bias, algorithm="fourier")]
    options = {"stride": 2, "padding": 1, "bias": bias, "algorithm": "fourier", "filters": "steerable"}
    layers.append(GroupConv(group, 3, 5, 3, **options))
    x = torch.randn(2, 3, group.order, 7, 7, dtype=torch.float64)
    for layer in layers:
        layer = randomised(layer).double()
        plain = revit.deploy(nn.Sequential(layer, nn.BatchNorm3d(5).double()).eval())
        assert isinstance(plain[0], PlainFourier)
        with torch.no_grad():
            expected = layer(x) / (1 + 1e-5) ** 0.5
            assert difference(plain(x), expected) <= 1e-10
        assert plain[0].multiply_adds(4, 4) == layer.multiply_adds(4, 4)
    assert isinstance(revit.deploy(GroupLinear(group, 3, 5)), PlainConv)


def kinds(plain):
    return {type(module) for module in plain.modules() if isinstance(module, PlainConv | PlainFourier)}


def test_an_image_size_fixes_what_auto_would_choose():
    """The choice of each layer is that of the model at this size; other sizes are computed the same way."""
    torch.manual_seed(0)
    options = {"group": "p16", "in_chans": 1, "dims": 24, "depths": 1, "kernel_size": 5, "projection": "full", "num_heads": 1}
    model = randomised(create_model("revit_tiny", attention="spatial", filters="steerable", **options)).double().eval()
    convolution = model.stages[0].blocks[0].attn.qkv.mix.algorithm
    assert convolution.name == "auto" and convolution.is_fourier(14 * 14) and not convolution.is_fourier(2 * 2)
    small, large, unsaid = (model.deploy(size) for size in (8, (28, 28), None))
    assert kinds(small) == kinds(unsaid) == {PlainConv} and kinds(large) == {PlainConv, PlainFourier}
    assert isinstance(large.stages[0].blocks[0].attn.qkv.mix, PlainFourier)
    for size in (8, 28):
        x = torch.randn(2, 1, size, size, dtype=torch.float64)
        assert max(largest_difference(model, plain, x) for plain in (small, large)) <= 1e-10
    assert convolution.name == "auto", "the model itself stays as it is"
    with pytest.raises(ValueError, match="27"):
        create_model("gcnn_rotmnist", group="p4", dims=2).deploy(20)
    with pytest.raises(ValueError, match="got Sequential without in_chans"):
        revit.deploy(nn.Sequential(GroupLinear("p4", 2, 2)), 8)


def test_backbones_and_wrappers_are_deployed():
    x = torch.randn(2, 1, 14, 14, dtype=torch.float64)
    maps = randomised(create_model("revit_tiny", features_only=True, **FLAT)).double().eval()
    wrapped = revit.nn.Canonical(build("1x1 projection")[0], "p4")
    with torch.no_grad():
        for found, expected in zip(revit.deploy(maps)(x), maps(x), strict=True):
            assert difference(found, expected) <= 1e-10
        assert difference(revit.deploy(wrapped, 14)(x), wrapped(x)) <= 1e-10


def test_audit_runs_on_deployed_models():
    model, x = build("flat p4m", torch.float32)
    audit = audit_model(model.deploy(), x, "p4m")
    assert audit.passed and list(audit.stages) == ["lift", "pre_class", "logits"]


def test_sizes_are_refused_as_before():
    plain = create_model("revit_tiny_paper", **FLAT, num_heads=2).deploy()
    with pytest.raises(revit.EquivarianceError, match="not p4 equivariant at height 28"):
        plain(torch.zeros(1, 1, 28, 28))
    with pytest.raises(ValueError, match="below the minimum"):
        plain(torch.zeros(1, 1, 2, 2))


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))


class OwnConv(GroupConv):
    """Someone's convolution, which may do anything with its filters."""


def test_unknown_modules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"does not know Unknown \(1.0\) and its table"):
        revit.deploy(nn.Sequential(nn.ReLU(), nn.Sequential(Unknown())))
    with pytest.raises(ValueError, match=r"does not know the layer OwnConv \(0\), which turns filters"):
        revit.deploy(nn.Sequential(OwnConv("p4", 1, 1, 3)))
    with pytest.raises(ValueError, match="without running statistics"):
        revit.deploy(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))
    known = type("Known", (Unknown,), {"folds": ()})
    assert torch.equal(revit.deploy(known()).table, torch.zeros(3))
