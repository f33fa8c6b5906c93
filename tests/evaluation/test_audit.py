"""The audit passes what is invariant, fails what is not, and leaves the model as it was."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from revit.data.spec import DataSpec
from revit.equivariance import equivariance_error, prediction_consistency
from revit.evaluation import audit_model, errors_by_angle, normalised_black, turn_by_angle
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.turning import turn_by_element
from revit.groups import Group
from revit.models import create_model
from tests.evaluation.models import OrbitMean, Plain, Sides

IMAGES = (24, 1, 12, 12)
SMALL = {"dims": 4, "depths": 1, "num_heads": 1}


def test_an_invariant_model_passes():
    audit = audit_model(OrbitMean(Plain()).double(), torch.rand(IMAGES), "p4m")
    assert audit.passed and audit.samples == 24 and audit.group == "p4m" and audit.exact == (True,) * 8
    assert audit.elements[:2] == ("0°", "90°") and audit.elements[4] == "mirror"
    assert max(audit.stages["logits"].largest) < 1e-12
    assert audit.consistency == (1.0,) * 8 and audit.mean_consistency_percent == 100


def test_a_plain_convolution_fails():
    audit = audit_model(Plain().double(), torch.rand(IMAGES), "p4m")
    assert not audit.passed
    assert audit.stages["logits"].relative[0] == 0 and min(audit.stages["logits"].relative[1:4]) > 0.01


def test_a_defect_in_one_pixel_fails():
    """A mean over many pixels would hide it below the tolerance; the largest error does not."""

    class OneBadPixel(nn.Module):
        def named_features(self, x):
            features = x.clone()
            features[..., 0, 0] += 1e-3
            return {"lift": features, "logits": x.mean((-2, -1)).repeat(1, 2)}

    audit = audit_model(OneBadPixel(), torch.rand(2, 1, 64, 64), "z2m")
    assert max(audit.stages["lift"].relative) < audit.tolerance < max(audit.stages["lift"].largest)
    assert not audit.passed


def test_errors_are_those_of_equivariance_error():
    group = "p8"
    model = create_model("revit_tiny", group=group, in_chans=1, **SMALL).double().eval()
    x = torch.randn(3, 1, 12, 12, dtype=torch.float64)
    audit = audit_model(model, x, group, batch_size=2)
    assert list(audit.stages) == ["lift", "pre_class", "logits"]  # its one block is what comes before the head
    for name, stage in audit.stages.items():
        measures = {
            "absolute": {},
            "relative": {"relative": True},
            "largest": {"relative": True, "reduction": "max"},
            "disc_absolute": {"disc": True},
            "disc_relative": {"disc": True, "relative": True},
        }
        for measure, options in measures.items():
            if name == "logits" and measure.startswith("disc"):
                assert getattr(stage, measure) is None
                continue
            expected = equivariance_error(model, x, group, feature=name, **options)
            found = torch.tensor(getattr(stage, measure), dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(torch.tensor(audit.consistency, dtype=torch.float64), prediction_consistency(model, x, group))
    assert audit.passed and audit.exact == (True, False) * 4  # the odd turns by 45 degrees are not exact and do not count


def test_features_of_another_group_are_left_out():
    model = create_model("revit_tiny", group="p4", in_chans=1, **SMALL).double().eval()
    audit = audit_model(model, torch.randn(2, 1, 12, 12), "p4m")
    assert list(audit.stages) == ["logits"]
    errors = audit.stages["logits"].relative
    assert errors[1] < 1e-12 < 1e-3 < errors[4]  # it turns, but has no mirrors
    assert not audit.passed


def test_consistency_counts_samples():
    x = torch.zeros(4, 1, 6, 6)
    x[:3, :, :, 0] = 1  # three are brighter on the left
    x[3] = 1  # one is even: a tie that no turn changes
    audit = audit_model(Sides(), x, "z2m")
    assert audit.consistency == (1.0, 0.25) and audit.mean_consistency_percent == 25
    assert audit_model(Sides(), x, "z2").mean_consistency_percent is None


def test_audits_are_json():
    values = json.loads(json.dumps(audit_model(Plain(), torch.rand(IMAGES), "p4").to_dict(), allow_nan=False))
    assert values["passed"] is False and values["broken_stage"] == "conv"
    errors = values["stages"]["logits"]["absolute"]
    assert values["stages"]["logits"]["absolute_mean"] == pytest.approx(sum(errors[1:]) / 3)
    assert json.dumps(audit_model(Plain(), torch.rand(IMAGES), "z2").to_dict(), allow_nan=False)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(Plain(), nn.BatchNorm1d(4)).train()
    model[1].eval()  # frozen on purpose
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audit_model(model, torch.rand(IMAGES), "p4")
    errors_by_angle(model, torch.rand(IMAGES), degrees=[10], fill=0.0)
    assert model.training and model[0].training and not model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="inside"), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError("inside")
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("angle", [30, 77.5, 135, 300])
def test_turning_is_that_of_pillow(angle):
    """An independent implementation, also bilinear and counter-clockwise; it treats the border differently."""
    from PIL import Image

    y, x = torch.meshgrid(torch.linspace(-2, 2, 33), torch.linspace(-2, 2, 33), indexing="ij")
    image = torch.exp(-((x - 0.5) ** 2) - 2 * (y + 0.3) ** 2)
    reference = np.asarray(Image.fromarray(image.numpy()).rotate(angle, Image.Resampling.BILINEAR))
    turned = turn_by_angle(image[None, None], angle)[0, 0].numpy()
    inside = (x**2 + y**2 < 3.2).numpy()
    assert np.abs(turned - reference)[inside].max() < 1e-4


def test_turned_in_corners_show_the_fill():
    x = torch.ones(1, 2, 9, 9)
    turned = turn_by_angle(x, 45, fill=(-3.0, 7.0))
    assert turned[0, :, 0, 0].tolist() == [-3, 7] and turned[0, :, 4, 4].tolist() == [1, 1]
    assert turn_by_element(x, Group(8), 1, fill=(-3.0, 7.0))[0, :, 0, 0].tolist() == [-3, 7]
    y = torch.rand(1, 2, 5, 7)
    assert torch.equal(turn_by_angle(y, 90), torch.rot90(y, 1, (-2, -1)))
    assert torch.equal(turn_by_angle(y, -90, fill=1.0), torch.rot90(y, 3, (-2, -1)))
    assert torch.equal(turn_by_element(y, Group(8, True), 10, fill=9.0), torch.rot90(y.flip(-1), 1, (-2, -1)))
    with pytest.raises(ValueError, match="images have 2 channels, got 3 values"):
        turn_by_angle(x, 45, fill=(1.0, 2.0, 3.0))


def test_normalised_black():
    spec = DataSpec("two", 2, (4, 4), ("a", "b"), (0.5, 0.2), (0.25, 0.1), "made up")
    assert normalised_black(spec) == (-2, -2)


def test_place_of():
    assert place_of(Plain().double()) == (torch.device("cpu"), torch.float64)
    assert place_of(Sides()) == (torch.device("cpu"), torch.float32)


def test_messages():
    with pytest.raises(ValueError, match=r"expected images \[N, C, H, W\], at least one, got shape \[0, 1, 4, 4\]"):
        audit_model(Plain(), torch.zeros(0, 1, 4, 4), "p4")
    with pytest.raises(ValueError, match=r"logits \[B, classes\] or \[B, classes, H, W\] for 1 images, got shape \[1, 1, 16\]"):
        audit_model(nn.Flatten(2), torch.zeros(1, 1, 4, 4), "p4")
    with pytest.raises(ValueError, match=r"got shape \[1, 1, 16\]"):
        errors_by_angle(nn.Flatten(2), torch.zeros(1, 1, 4, 4), degrees=[0], fill=0.0)
