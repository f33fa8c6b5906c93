"""Every registered model against every exact group: shapes, exactness, gradients, checkpoints, compilation."""

import functools
import io
import itertools
import math
import shutil
import warnings

import pytest
import torch

from revit.equivariance import equivariance_error
from revit.evaluation.complexity import count_macs, measured_macs
from revit.exactness import EquivarianceError
from revit.models import FeatureMaps, REViT, create_model, list_models, register_model
from tests.models.networks import GENERATORS, count, relative_errors

NOT_EQUIVARIANT = {"vit_tiny", "vit_small_patch16", "cvt_tiny"}
"""Baselines without a group, of which `test_vit.py` and `test_cvt.py` ask the opposite."""
EQUIVARIANT = {
    *("gcnn_rotmnist", "gcnn_cifar", "gcnn_cifar_paper", "gcnn_pcam"),
    *("gsa_rotmnist", "gsa_cifar", "gsa_pcam"),
    *("attentive_gcnn_rotmnist", "attentive_gcnn_pcam"),
    *("re_resnet", "re_resnet_paper", "re_resnet_small"),
}
"""Equivariant baselines: tests of their own hold narrow ones to the same errors, at the sizes that they are made for."""
MODELS = [name for name in list_models() if name not in NOT_EQUIVARIANT | EQUIVARIANT and "seg" not in name]
OURS = [name for name in MODELS if not name.endswith("_paper")]
PAPER = [name for name in MODELS if name.endswith("_paper")]
LARGE = ("revit_hier_medium", "revit_hier_base")
"""Their banks take gigabytes in float64: `make test-slow` runs them in full."""


def test_names():
    flat, hierarchical = ("tiny", "small", "base"), ("tiny", "small", "medium", "base")
    assert sorted([f"revit_{size}" for size in flat] + [f"revit_hier_{size}" for size in hierarchical]) == OURS
    assert sorted(f"{name}_paper" for name in OURS) == PAPER
    assert set(list_models()) >= NOT_EQUIVARIANT | EQUIVARIANT
    assert list_models("hier_tiny") == ["revit_hier_tiny", "revit_hier_tiny_paper"]


@functools.lru_cache(maxsize=1)
def random_model(preset, group):
    return create_model(preset, group=group, in_chans=2, num_classes=7).double()


def exactness_cases():
    for preset, group, size in itertools.product(OURS, ("z2", "z2m", "p4", "p4m"), (28, 32, 96, 224)):
        if size < 224 or "hier" in preset:
            slow = preset in LARGE and (size > 28 or group in ("p4", "p4m"))
            yield pytest.param(preset, group, size, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("preset", "group", "size"), list(exactness_cases()))
def test_fp64_model(preset, group, size):
    """float64 error of features and logits <= 1e-10 relative, in train and in eval mode, with statistics of real batches."""
    model = random_model(preset, group)
    x = torch.randn(2, 2, size, size, dtype=torch.float64)
    with torch.no_grad():
        for training in (True, False):
            model.train(training)
            errors = relative_errors(model, x, group, GENERATORS[group])
            assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("preset", PAPER)
def test_paper_mode_reproduces_error(preset):
    """The guard: with the released code's odd strided kernels the same test must fail at even sizes."""
    groups = ("z2m",) if "base" in preset or "medium" in preset else ("z2m", "p4", "p4m")
    for group in groups:
        model = create_model(preset, group=group, in_chans=2, strict=False, init="normal").double().eval()
        for size in (28, 96):
            x = torch.randn(1, 2, size, size, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                errors = relative_errors(model, x, group, GENERATORS[group])
            assert errors["lift"] > 1e-3 and errors["pre_class"] > 1e-3


def test_paper_mode_is_exact_where_its_strides_are():
    for preset, size in (("revit_small_paper", 29), ("revit_hier_tiny_paper", 33)):
        model = create_model(preset, group="p4m", in_chans=1).double().eval()
        assert model.check_input_size(size)
        x = torch.randn(1, 1, size, size, dtype=torch.float64)
        assert max(relative_errors(model, x, "p4m", range(8)).values()) < 1e-10


@pytest.mark.parametrize(
    ("preset", "options", "parameters"),
    [
        ("revit_tiny_paper", {"group": "z2", "dims": 16, "stride": 1, "in_chans": 1}, 44_282),
        ("revit_small_paper", {"group": "p4", "stride": 1, "in_chans": 1}, 97_704),
        ("revit_small_paper", {"group": "p4", "in_chans": 1}, 97_764),
        ("revit_small_paper", {"group": "p8", "dims": 10, "depths": 3, "num_heads": 5, "stride": 1, "in_chans": 1}, 101_431),
        ("revit_small_paper", {"group": "p4m", "depths": 3, "kernel_size": 3, "num_classes": 2}, 94_346),
        ("revit_small_paper", {"group": "p8", "depths": 3, "kernel_size": 3, "num_classes": 2}, 94_346),
        ("revit_base_paper", {"group": "p4m", "stride": 1}, 1_123_380),
        ("revit_base_paper", {"group": "p4m", "dims": 24, "depths": 9, "stride": 1}, 1_123_720),
        ("revit_hier_tiny_paper", {"group": "p4"}, 2_316_000),
        ("revit_hier_small_paper", {"group": "p4"}, 9_428_000),
        ("revit_hier_small_paper", {"group": "p4m"}, 18_537_852),
        ("revit_hier_medium_paper", {"group": "p4"}, 16_530_000),
        ("revit_hier_medium_paper", {"group": "p4m"}, 32_730_000),
    ],
)
def test_param_counts(preset, options, parameters):
    """The counts of the paper's tables, by the unit where SPEC counts by the unit and to its four digits elsewhere."""
    exact = parameters % 1000
    model = create_model(preset, init="normal", **options)
    assert count(model) == (parameters if exact else pytest.approx(parameters, rel=5e-4))


@pytest.mark.parametrize(
    ("preset", "options", "about"),
    [
        ("revit_tiny", {"group": "p4", "in_chans": 1}, 44_000),
        ("revit_small", {"group": "p4", "in_chans": 1}, 100_000),
        ("revit_base", {"group": "p4m", "in_chans": 3}, 1_100_000),
    ],
)
def test_sizes_are_about_what_they_say(preset, options, about):
    assert count(create_model(preset, **options)) == pytest.approx(about, rel=0.06)


@pytest.mark.parametrize("preset", [name for name in MODELS if "hier" not in name or "tiny" in name])
@pytest.mark.parametrize("group", ["z2", "z2m", "p2", "p4", "p4m", "p8", "p6m"])
def test_shapes_and_gradients(preset, group):
    model = create_model(preset, group=group, in_chans=2, num_classes=3)
    x = torch.randn(3, 2, 33, 33 if preset.endswith("_paper") else 29)  # the paper's strides are exact at 33
    features = model.forward_features(x)
    assert features.shape[:3] == (3, model.num_features, model.group.order)
    logits = model.forward_head(features)
    assert logits.shape == (3, 3) and model.forward_head(features, pre_logits=True).shape == (3, model.num_features)
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize("size", [(28, 28), (29, 31), (30, 47), (64, 28), (13, 97)])
@pytest.mark.parametrize("preset", ["revit_tiny", "revit_hier_tiny"])
def test_any_size_is_exact(preset, size, group):
    model = create_model(preset, group=group, in_chans=1).double().eval()
    x = torch.randn(1, 1, *size, dtype=torch.float64)
    assert max(relative_errors(model, x, group, range(model.group.order)).values()) <= 1e-10


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "joint", "neighbourhood": "global"},
        {"attention": "spatial", "neighbourhood": "global", "projection": "full"},
        {"attention": "per_element", "neighbourhood": "local", "window_size": 3},
        {"norm": "layer", "shift_windows": True, "window_size": 4},
        {"filters": "rbf", "stride": 4, "kernel_size": 3},
        {"filters": "steerable", "stride": 1, "kernel_size": 1, "mlp_ratio": 2},
        {"stride": (2, 2), "dims": (8, 16), "depths": (1, 2), "num_heads": (1, 2)},
        {"stride": (2, 2), "dims": (8, 16), "depths": (1, 2), "num_heads": (1, 2), "smooth_strides": True},
        {"stride": 4, "smooth_strides": True},
    ],
)
def test_options_stay_exact(options):
    model = create_model("revit_tiny", group="p4m", in_chans=1, **options).double().eval()
    x = torch.randn(1, 1, 24, 16, dtype=torch.float64)
    assert max(relative_errors(model, x, "p4m", range(8)).values()) <= 1e-10


@pytest.mark.parametrize("size", [(28, 28), (29, 31), (13, 22)])
def test_smooth_strides_are_exact_at_every_size_and_say_their_sizes(size):
    options = {"dims": (4, 6), "depths": (1, 1), "num_heads": (1, 2), "stride": (2, 2), "smooth_strides": True}
    model = create_model("revit_tiny", group="p4", in_chans=1, neighbourhood="global", **options).double().eval()
    x = torch.randn(1, 1, *size, dtype=torch.float64)
    assert max(relative_errors(model, x, "p4", range(4)).values()) <= 1e-10
    sizes = list(model.check_input_size(*size).values())
    assert sizes[-1] == tuple(model.forward_features(x).shape[-2:]) and sizes[0] == size
    torch.testing.assert_close(model.deploy()(x), model(x), rtol=1e-9, atol=1e-10)
    formula, counted = count_macs(model, size), measured_macs(model, x)
    assert (formula.convolution, formula.attention) == (counted.convolution, counted.attention)


def test_smooth_strides_turn_better_between_the_turns_of_p4():
    """Features of strokes drawn at two angles, of untrained p8 models: the reason for the option."""
    generator = torch.Generator().manual_seed(0)
    ends = 18 * torch.rand(16, 4, 2, 2, generator=generator, dtype=torch.float64) - 9  # four strokes in each image

    def draw(angle):
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
        start, end = (ends @ turn.T).unbind(2)  # [B, strokes, 2]
        pixels = torch.cartesian_prod(*2 * [torch.arange(28, dtype=torch.float64) - 13.5])  # [28*28, 2]
        offset, along = pixels - start.unsqueeze(2), (end - start).unsqueeze(2)
        share = ((offset * along).sum(-1) / along.square().sum(-1)).clamp(0, 1).unsqueeze(-1)
        distance = (offset - share * along).square().sum(-1)  # [B, strokes, 28*28]
        return torch.exp(-distance / 1.5).amax(1).view(-1, 1, 28, 28)

    upright, turned = draw(0.1), draw(0.1 + math.pi / 4)
    errors = []
    for smooth in (False, True):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = create_model(
                "revit_tiny", group="p8", in_chans=1, dims=(6, 8), depths=(1, 1), num_heads=(1, 1), filters="steerable",
                smooth_strides=smooth, attention="spatial", neighbourhood="global",
            ).double()  # fmt: skip
            for norm in model.modules():
                if hasattr(norm, "momentum"):
                    norm.momentum = 1.0
            model(upright)  # the statistics of norms
            features = [model.eval().forward_head(model.forward_features(x), pre_logits=True) for x in (upright, turned)]
            found.append(((features[1] - features[0]).norm() / (features[0] - features[0].mean(0)).norm()).item())
        errors.append(sum(found) / len(found))
    assert errors[1] < 0.6 * errors[0]


def test_float32_meets_its_own_tolerance():
    model = create_model("revit_small", group="p4m").eval()
    x = torch.randn(4, 3, 28, 28)
    assert equivariance_error(model, x, "p4m", feature="lift", relative=True).max() < 1e-6
    assert equivariance_error(model, x, "p4m", feature="pre_class", relative=True).max() < 5e-6
    assert equivariance_error(model, x, "p4m", reduction="max").max() < 1e-4


def test_checkpoint_round_trip(exact_group):
    model = create_model("revit_tiny", group=exact_group).eval()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    copy = create_model("revit_tiny", group=exact_group).eval()
    copy.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(x), copy(x))
    assert not any("index" in key or "basis" in key for key in model.state_dict())  # weights only


def test_features_only():
    flat = create_model("revit_tiny", group="p4", in_chans=1, features_only=True, out_indices=(0, -1))
    maps = flat(torch.randn(2, 1, 28, 28))
    assert [m.shape for m in maps] == [(2, 64, 14, 14)] * 2 and flat.channels() == [64, 64] and flat.reduction() == [2, 2]
    hier = create_model("revit_hier_tiny", group="p4m", features_only=True, out_indices=(1, 2)).double().eval()
    x = torch.randn(1, 3, 64, 48, dtype=torch.float64)
    maps = hier(x)
    assert [m.shape for m in maps] == [(1, 24 * 8, 8, 6), (1, 48 * 8, 4, 3)]
    assert hier.reduction() == [8, 16]
    for i in range(2):
        assert equivariance_error(lambda x, i=i: hier(x)[i], x, "p4m", kind="stacked", relative=True).max() < 1e-10
    whole = create_model("revit_hier_tiny", group="p4m")
    assert count(hier) < count(whole)  # no head, no last stage
    assert len(create_model("revit_hier_tiny", features_only=True).feature_info) == 4
    for indices in ((4,), (0, 0), (), ("1",), (0, -4)):
        with pytest.raises(ValueError, match="out_indices must"):
            create_model("revit_hier_tiny", features_only=True, out_indices=indices)
    with pytest.raises(ValueError, match="out_indices needs features_only=True"):
        create_model("revit_tiny", out_indices=(1,))


def test_features_are_those_of_the_whole_model():
    torch.manual_seed(5)
    whole = create_model("revit_hier_tiny", group="p4").eval()
    torch.manual_seed(5)
    maps = FeatureMaps(create_model("revit_hier_tiny", group="p4"), (0, 3)).eval()
    x = torch.randn(1, 3, 32, 32)
    named = whole.named_features(x)
    assert torch.equal(maps(x)[1], named["pre_class"].flatten(1, 2))
    assert torch.equal(maps(x)[0], named["stages.0.blocks.0"].flatten(1, 2))


def test_classifier_can_be_replaced():
    model = create_model("revit_tiny", group="p4", num_classes=5).double().eval()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert model.get_classifier().out_features == 5
    model.reset_classifier(3)
    assert model(x).shape == (2, 3) and model.num_classes == 3 and model(x).dtype == torch.float64
    assert not model.head.training
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features) and isinstance(model.get_classifier(), torch.nn.Identity)


def test_weight_decay_spares_norms_biases_and_scales():
    model = create_model("revit_tiny")
    spared = model.no_weight_decay()
    assert "stages.0.blocks.0.scale1" in spared and "stages.0.blocks.0.norm1.weight" in spared and "head.fc.bias" in spared
    assert "stages.0.blocks.0.attn.proj.filters.weight" not in spared and "head.fc.weight" not in spared


def test_grad_checkpointing_gives_the_same_gradients():
    def gradients(enable):
        torch.manual_seed(2)
        model = create_model("revit_tiny", group="p4", in_chans=1, drop_path_rate=0.3, drop_rate=0.2).double()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        model(torch.randn(4, 1, 16, 16, dtype=torch.float64)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_compiled_model_equals_eager():
    """Through inductor where a C++ compiler is installed, otherwise through its tracing and lowering alone."""
    backend = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    torch.manual_seed(0)
    model = create_model("revit_tiny", group="p4", in_chans=1).eval()
    x = torch.randn(4, 1, 28, 28)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-5)


def test_check_input_size_names_layer_and_sizes():
    sizes = create_model("revit_hier_tiny", group="p4m").check_input_size(224)
    assert sizes["stem.0"] == (112, 112) and list(sizes.values())[-1] == (7, 7)
    assert list(create_model("revit_hier_tiny").check_input_size(225, 200).values())[-1] == (8, 7)
    paper = create_model("revit_hier_tiny_paper", group="p4m")
    with pytest.raises(
        EquivarianceError, match=r"stem.0: .* at height 224.*Nearest exact input sizes of the model: 193 and 225"
    ):
        paper.check_input_size(224)
    with pytest.raises(EquivarianceError, match="height 193 and 225, width 225"):
        paper.check_input_size(224, 225)
    assert paper.check_input_size(225)["stem.0"] == (113, 113)
    with pytest.raises(EquivarianceError, match="not p4m equivariant at height 224"):
        paper(torch.zeros(1, 3, 224, 224))
    windows = create_model("revit_tiny", window_size=6)
    with pytest.raises(EquivarianceError, match=r"blocks.0.attn: even windows of 6 cannot tile an odd height 13"):
        windows.check_input_size(26)


def nan_image():
    x = torch.zeros(3, 3, 16, 16)
    x[1, 0, 2, 2] = torch.nan
    return x


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(1, 1, 16, 16), r"expected images \[B, 3, H, W\], got shape \[1, 1, 16, 16\]"),
        (torch.zeros(3, 16, 16), r"got shape \[3, 16, 16\]"),
        (torch.zeros(1, 3, 3, 16), "images of 3 x 16 are below the minimum of 4 x 4"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "expected floating-point images, got torch.uint8; scale them"),
        (nan_image(), r"NaN or infinite pixels at batch positions \[1\]"),
    ],
)
def test_bad_images_are_refused(image, message):
    with pytest.raises(ValueError, match=message):
        create_model("revit_tiny")(image)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "revit_tinny"}, "unknown model 'revit_tinny'; did you mean revit_tiny"),
        ({"name": "resnet"}, "unknown model 'resnet'; did you mean"),
        ({"group": "p7q"}, "unknown group 'p7q'"),
        ({"group": "p1000"}, "at most 256"),
        ({"num_heads": 3}, "num_heads=3 does not divide the 16 fields; choose 1, 2, 4, 8, 16"),
        ({"dims": (8, 16)}, r"same number of stages is needed in dims=\(8, 16\), depths=\(3,\)"),
        ({"name": "revit_tiny_paper", "dims": (8, 16)}, r"same number of stages is needed in dims=\(8, 16\), depths=\(4,\)"),
        ({"name": "revit_hier_tiny", "dims": 8}, r"same number of stages is needed in dims=\(8,\)"),
        ({"name": "revit_hier_tiny", "dims": "8"}, "dims must be whole numbers >= 1, got '8'"),
        ({"dims": 0}, "dims must be whole numbers >= 1, got 0"),
        ({"stride": (2, 4)}, r"after the first have stride 2, got stride=\(2, 4\)"),
        ({"stride": 3}, "an exact stride is 1 or even, got 3"),
        ({"stride": 6, "smooth_strides": True}, "a smooth stride is 1, 2, 4, ..., got 6"),
        ({"odd_strides": True, "smooth_strides": True}, "smooth_strides and odd_strides exclude each other"),
        ({"init": "zeros"}, "unknown init 'zeros'; choose normal, released"),
        ({"widths": 3}, "model 'revit_tiny': .*unexpected keyword argument 'widths'"),
        ({"num_classes": -1}, "num_classes >= 0"),
        ({"drop_rate": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"in_chans": 0}, "in_channels must be a whole number >= 1, got 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_model(**{"name": "revit_tiny", **options})


def test_a_name_can_be_registered_once():
    def revit_tiny():
        return REViT()

    with pytest.raises(ValueError, match="a model named 'revit_tiny' is already registered"):
        register_model(revit_tiny)
