"""Segmentation models: masks turn with the image at every size, in training too, deployed and exported."""

import pytest
import torch
from torch import nn

import revit.nn.upsampling as upsampling
from revit import deploy
from revit.actions import act_on_features, act_on_plane
from revit.equivariance import equivariance_error
from revit.evaluation import audit_model, errors_by_angle
from revit.models import REViTSegmenter, create_model, list_models
from revit.nn import UpsampleJoin, upsample_to
from tests.models.networks import GENERATORS, count
from tests.test_deploy import randomised

SMALL = {"in_chans": 2, "num_classes": 3, "dims": (4, 6), "depths": (1, 1), "num_heads": (1, 2), "kernel_size": 3}


def build(group="p4", **options):
    torch.manual_seed(0)
    return create_model("revit_seg_tiny", **{**SMALL, "group": group, **options})


def errors(model, x, group):
    """Largest relative error of every map under the generators of a group; the logits turn as images do."""
    with torch.no_grad():
        upright, worst = model.named_features(x), {}
        for g in GENERATORS[group]:
            turned = model.named_features(act_on_plane(x, group, g).contiguous())
            for name, value in upright.items():
                expected = act_on_plane(value, group, g) if name == "logits" else act_on_features(value, group, g)
                error = ((turned[name] - expected).abs().max() / expected.abs().max()).item()
                worst[name] = max(worst.get(name, 0.0), error)
    return worst


def test_names():
    assert list_models("seg") == ["revit_seg_base", "revit_seg_small", "revit_seg_tiny"]
    model = create_model("revit_seg_tiny", group="p4m", num_classes=5)
    assert isinstance(model, REViTSegmenter) and model.task == "segmentation" and model.num_classes == 5
    assert model.reductions == [1, 2, 4, 8, 16, 32] and len(model.decoder) == 5
    assert count(model) < 1.3 * count(create_model("revit_hier_tiny", group="p4m", num_classes=5))


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
@pytest.mark.parametrize("size", [(24, 24), (25, 19), (22, 9)])
def test_masks_turn_with_the_image(group, size):
    """float64, train and eval mode, even and odd sizes: 1e-10 for each feature map and for the logits at the input size."""
    model = build(group).double()
    x = torch.randn(2, 2, *size, dtype=torch.float64)
    with torch.no_grad():
        assert model(x).shape == (2, 3, *size)
    for training in (True, False):
        found = errors(model.train(training), x, group)
        assert max(found.values()) <= 1e-10, found


FLAT = {"dims": 4, "depths": 2, "num_heads": 1, "stride": 2, "window_size": 4}


@pytest.mark.parametrize("options", [{"stride": 1, "window_size": 4}, {"stride": 4, "norm": "layer"}, {"filters": "rbf"}, FLAT])
def test_options_stay_exact(options):
    model = build("p4m", **options).double().eval()
    x = torch.randn(1, 2, 16, 12, dtype=torch.float64)
    found = errors(model, x, "p4m")
    assert max(found.values()) <= 1e-10, found
    assert model.reductions[0] == 1 and model.check_input_size(16, 12)


def test_one_sided_upsampling_would_be_seen(monkeypatch):
    """The test above fails for up-sampling that begins at a corner instead of the centre."""

    def from_the_corner(x, size):
        return upsample_to(x, (size[0] + 1, size[1] + 1))[..., : size[0], : size[1]]

    monkeypatch.setattr(upsampling, "upsample_to", from_the_corner)
    found = errors(build().double().eval(), torch.randn(1, 2, 16, 16, dtype=torch.float64), "p4")
    assert found["logits"] > 1e-3 and found["stages.1.blocks.0"] <= 1e-10


@pytest.mark.parametrize(("old", "new"), [((3, 4), (6, 8)), ((2, 3), (5, 7)), ((1, 1), (3, 2)), ((4, 4), (4, 4))])
def test_upsampling_is_bilinear_about_the_centre(old, new):
    x = torch.randn(2, 3, 4, *old, dtype=torch.float64)
    out = upsample_to(x, new)
    assert out.shape == (2, 3, 4, *new)
    for i in range(new[0]):
        for j in range(new[1]):
            value = 0
            places = [min(max((k + 0.5) * h / n - 0.5, 0), h - 1) for k, h, n in zip((i, j), old, new, strict=True)]
            for y in range(old[0]):
                for z in range(old[1]):
                    value = value + x[..., y, z] * max(0, 1 - abs(places[0] - y)) * max(0, 1 - abs(places[1] - z))
            torch.testing.assert_close(out[..., i, j], value, rtol=0, atol=1e-13)
    assert upsample_to(x[:, :, 0], new).shape == (2, 3, *new)


def test_a_decoder_step_joins_both_maps():
    step = UpsampleJoin("p4", 6, 2, 3)
    x, skip = torch.randn(1, 6, 4, 3, 3), torch.randn(1, 2, 4, 5, 6)
    assert step(x, skip).shape == (1, 3, 4, 5, 6)
    for changed in ((x + 1, skip), (x, skip + 1)):
        assert not torch.allclose(step(*changed), step(x, skip))


def test_every_parameter_learns_and_the_classifier_can_be_replaced():
    model = build()
    logits = model(torch.randn(2, 2, 16, 16))
    nn.functional.cross_entropy(logits, torch.randint(0, 3, (2, 16, 16))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert "encoder.stages.0.blocks.0.scale1" in model.no_weight_decay() and model.get_classifier().out_channels == 3
    model.reset_classifier(5)
    assert model.num_classes == 5 and model(torch.randn(1, 2, 8, 8)).shape == (1, 5, 8, 8)
    model.reset_classifier(0)
    assert model(torch.randn(1, 2, 8, 8)).shape == (1, model.num_features, 8, 8)
    model.set_grad_checkpointing()
    assert model.encoder.grad_checkpointing
    with pytest.raises(ValueError, match="num_classes >= 0"):
        build(num_classes=-1)
    with pytest.raises(ValueError, match=r"expected images \[B, 2, H, W\]"):
        build()(torch.zeros(1, 3, 8, 8))


def test_deployed_models_give_the_same_masks():
    model = randomised(build("p4m")).double().eval()
    x = torch.randn(1, 2, 12, 15, dtype=torch.float64)
    plain = model.deploy()
    with torch.no_grad():
        expected, found = model.named_features(x), plain.named_features(x)
        assert list(expected) == list(found)
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-10 * value.abs().max(), name
        assert torch.equal(deploy(plain)(x), plain(x))
    assert not [name for name, m in plain.decoder.named_modules() if isinstance(m, nn.BatchNorm3d)]
    assert equivariance_error(plain, x, "p4m", relative=True, reduction="max").max() <= 1e-10


def test_exported_masks_turn_with_the_image():
    """The file of 8-bit weights, after the float32 one was compared: turned copies of a filter are rounded alike."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from revit.export import export_model

    model = randomised(build("p4", **{**FLAT, "depths": 1})).eval()
    x = torch.randn(3, 2, 16, 16)
    exported = export_model(model, x, any_size=False, int8=True)
    assert exported.difference <= 1e-5 and 0.9 < exported.agreement <= 1
    file = exported.load()
    assert file(x[:1]).shape == (1, 3, 16, 16)
    audit = audit_model(file, x, "p4")
    assert audit.stages["logits"].kind == "image" and audit.worst("logits") <= 1e-4


def test_the_audit_knows_that_masks_turn():
    model = build("p4").double().eval()
    x = torch.randn(3, 2, 16, 16, dtype=torch.float64)
    audit = audit_model(model, x, "p4")
    assert audit.passed and audit.stages["logits"].kind == "image" and audit.consistency == (1.0,) * 4
    assert list(audit.stages)[-2:] == ["pre_class", "logits"] and "decoder.0" in audit.stages
    by_angle = errors_by_angle(model, x, fill=0.0, degrees=(0, 45, 90))
    assert [found.consistency_percent for found in by_angle.frame][::2] == [100, 100]
    assert by_angle.frame[2].logit_error < 1e-10 < 1e-3 < by_angle.frame[1].logit_error

    plain = nn.Conv2d(2, 4, 3, padding=1).double()  # four channels could also be a field on p4; an answer is an image
    broken = audit_model(plain, x, "p4")
    assert not broken.passed and broken.stages["logits"].kind == "image" and broken.consistency[1] < 0.9


def test_the_maps_of_the_decoder_are_features():
    maps = create_model("revit_seg_tiny", group="p4", features_only=True, pool="group", **SMALL).eval()
    assert maps.reduction() == [1, 2, 4] and maps.channels() == [8, 8, 4]
    assert [found.shape for found in maps(torch.randn(1, 2, 16, 16))] == [(1, 8, 16, 16), (1, 8, 8, 8), (1, 4, 4, 4)]
