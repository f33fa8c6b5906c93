"""The auditor is itself tested: what it must fail, what it must pass, and that it names the layer that breaks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.actions import act_on_plane
from revit.evaluation import audit_model
from revit.evaluation.stages import read_stages
from revit.groups import Group
from revit.models import create_model

IMAGES = torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers one after another, the mean over the plane, a linear classifier: invariant if its layers are equivariant."""

    def __init__(self, *layers, width=3):
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(self.body(x).mean((-2, -1)))


class SymmetricConv(nn.Module):
    """A hand-made exact layer: a 3 x 3 filter that is the same for all eight turns and mirrors, by rot90 and flip alone."""

    def __init__(self, channels):
        super().__init__()
        weight = torch.randn(channels, channels, 3, 3, dtype=torch.float64)
        orbit = [torch.rot90(w, r, (-2, -1)) for w in (weight, weight.flip(-1)) for r in range(4)]
        self.weight = nn.Parameter(torch.stack(orbit).mean(0))

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=1)


class Shifted(nn.Module):
    """An exact layer, moved by one pixel: it turns, but about another point."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).roll(1, -1)


def one_sided(x):
    return F.pad(x, (0, 1, 0, 1))


class OneSidedPadding(nn.Module):
    def forward(self, x):
        return F.avg_pool2d(one_sided(x), 2, stride=1)


def audit(model, group="p4m", x=IMAGES):
    return audit_model(model.double(), x, group)


def test_a_hand_made_exact_model_passes():
    found = audit(Net(SymmetricConv(3), nn.ReLU(), SymmetricConv(3), nn.AvgPool2d(2)))
    assert found.passed and found.broken_stage() is None and found.consistency == (1.0,) * 8
    assert list(found.stages) == ["body.0", "body.1", "body.2", "body.3", "logits"]
    assert [stage.kind for stage in found.stages.values()] == ["image"] * 4 + ["invariant"]
    assert all(found.worst(name) < 1e-12 for name in found.stages)


def test_a_plain_cnn_fails_at_its_first_convolution():
    found = audit(Net(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)))
    assert not found.passed and found.broken_stage() == "body.0"
    assert found.worst("logits") > 1e-2


@pytest.mark.parametrize(
    ("layer", "where"),
    [(OneSidedPadding(), 2), (nn.Conv2d(3, 3, 3, padding=1), 2), (Shifted(SymmetricConv(3)), 2), (nn.AvgPool2d(3, 2, 1), 2)],
    ids=["one-sided padding", "plain convolution", "shifted action", "odd stride at an even size"],
)
def test_the_layer_that_breaks_is_named(layer, where):
    """Everything before it is exact, everything after it inherits the error."""
    layers = [SymmetricConv(3), nn.ReLU(), layer, SymmetricConv(3)]
    found = audit_model(Net(*layers).double(), IMAGES, "p4m", every_layer=True)
    assert not found.passed and found.broken_stage().startswith(f"body.{where}")
    assert found.worst("body.0") < 1e-12 and found.worst(f"body.{where}") > 1e-2 and found.worst("body.3") > 1e-2


def test_a_shift_hides_from_the_logits_but_not_from_the_stages():
    """The mean over the plane does not see a circular shift. A module that claims no features keeps its promise then; one
    that claims them, or is asked about every layer, does not."""
    model = Net(Shifted(SymmetricConv(3))).double()
    found = audit(model)
    assert (
        found.passed and found.claimed == ("logits",) and found.worst("body.0.inner") < 1e-12 and found.worst("body.0") > 1e-2
    )
    strict = audit_model(model, IMAGES, "p4m", every_layer=True)
    assert not strict.passed and strict.broken_stage() == "body.0" and strict.worst("logits") < 1e-12

    class Claiming(Net):
        def named_features(self, x):
            return {"lift": self.body(x), "logits": self(x)}

    assert audit(Claiming(Shifted(SymmetricConv(3)))).broken_stage() == "lift"


def test_a_wrong_group_fails():
    model = create_model("revit_tiny", group="p4", in_chans=3, dims=4, depths=1, num_heads=1).double().eval()
    assert audit(model, "p4").passed and not audit(model, "p4m").passed
    assert not audit(create_model("revit_tiny", group="z2m", in_chans=3, dims=4, depths=1, num_heads=1), "p4").passed


def test_features_that_are_permuted_wrongly_fail():
    """Turning the plane and leaving the elements where they are is no action on the group."""
    model = create_model("revit_tiny", group="p4", in_chans=3, dims=4, depths=1, num_heads=1).double().eval()

    class Relabelled(nn.Module):
        def named_features(self, x):
            features = model.named_features(x.double())
            return {"lift": features["lift"][:, :, [1, 0, 2, 3]], "logits": features["logits"]}

    found = audit(Relabelled(), "p4")
    assert found.broken_stage() == "lift" and found.worst("logits") < 1e-5


def test_stacked_features_of_foreign_modules_are_recognised():
    """[B, C*G, H, W] with the element axis inside the channels, as e2cnn and escnn store it."""
    model = create_model("revit_tiny", group="p4", in_chans=3, dims=3, depths=1, num_heads=1).double().eval()

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Sequential(model.stem, nn.Flatten(1, 2))
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(self.lift(x).unflatten(1, (3, 4)).mean((2, 3, 4)))

    found = audit(Stacked(), "p4")
    assert found.stages["lift.1"].kind == "stacked" and found.passed


def test_tokens_are_maps():
    class Tokens(nn.Module):
        def __init__(self, class_token):
            super().__init__()
            self.patch, self.norm, self.fc = nn.AvgPool2d(4), nn.LayerNorm(3), nn.Linear(3, 2)
            self.class_token = class_token

        def forward(self, x):
            tokens = self.patch(x).flatten(2).transpose(1, 2)  # [B, N, C]
            if self.class_token:
                tokens = torch.cat((tokens.mean(1, keepdim=True), tokens), 1)
            return self.fc(self.norm(tokens).mean(1))

    for class_token in (False, True):
        stages = read_stages(Tokens(class_token).double(), IMAGES)
        assert stages["norm"].shape == (6, 3, 4, 4)
        assert audit(Tokens(class_token)).passed
    assert "norm" in audit(Tokens(True), x=torch.rand(2, 3, 8, 16, dtype=torch.float64), group="z2m").stages


def test_position_encodings_are_found():
    class Positions(nn.Module):
        def forward(self, x):
            return x + torch.linspace(0, 1, x.shape[-1])

    assert audit(Net(SymmetricConv(3), Positions(), nn.ReLU())).broken_stage() == "body.1"


def test_nan_does_not_pass():
    class Nan(nn.Module):
        def forward(self, x):
            return x.mean((-2, -1)) * math.nan

    found = audit(Nan())
    assert not found.passed and found.broken_stage() == "logits"


def test_shapes_that_do_not_turn_are_a_break_and_not_a_crash():
    class Wide(nn.Module):
        def forward(self, x):
            return F.adaptive_avg_pool2d(x, (2, 4))

    model, x = Net(SymmetricConv(3), Wide()).double(), torch.rand(2, 3, 8, 8, dtype=torch.float64)
    found = audit_model(model, x, "p4", every_layer=True)
    assert found.broken_stage() == "body.1" and found.to_dict()["stages"]["body.1"]["largest"][1] is None


def test_layers_used_twice_are_two_stages():
    conv = SymmetricConv(3)
    assert list(read_stages(Net(conv, nn.ReLU(), conv).double(), IMAGES)) == ["body.0", "body.1", "body.0#2", "logits"]


def test_torchscript_has_its_output_alone():
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.trace(Net(SymmetricConv(3)).double(), IMAGES)
    found = audit_model(scripted, IMAGES, "p4m")
    assert list(found.stages) == ["logits"] and found.passed


@pytest.mark.parametrize(("group", "ratio"), [("p8", math.sqrt(3 / 4)), ("p12", math.sqrt(3 / 8)), ("p16", 0.5)])
def test_protocol_std_ratio(group, ratio):
    """Three of the elements are exact; if the others have one error, std / mean is sqrt(exact / inexact) (SPEC A7)."""

    class Answer(nn.Module):
        """Zero for images that were not resampled, one for those that were: pixels between two values give it away."""

        def forward(self, x):
            resampled = ((x - x.round()).abs() > 1e-6).flatten(1).any(1)
            return torch.stack((resampled, ~resampled), 1).double()

    x = torch.randint(0, 2, (4, 1, 15, 15), generator=torch.Generator().manual_seed(1)).double()
    mean, deviation = audit_model(Answer(), x, group).stages["logits"].over_elements()
    assert deviation / mean == pytest.approx(ratio, abs=1e-12)


def test_protocol_std_ratio_of_a_model():
    """A p8 model on smooth images: 0.866 +- 0.02 at the lift and before the head, as the paper's own figures have it."""
    noise = torch.randn(8, 1, 29, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    smooth = F.avg_pool2d(F.avg_pool2d(noise, 5, 1, 2), 5, 1, 2)
    model = create_model("revit_tiny", group="p8", in_chans=1, dims=4, depths=1, num_heads=1, stride=1).double().eval()
    found = audit_model(model, smooth, "p8")
    for name in ("lift", "pre_class"):
        mean, deviation = found.stages[name].over_elements()
        assert deviation / mean == pytest.approx(math.sqrt(3 / 4), abs=0.02)
        inexact = [e for e, exact in zip(found.stages[name].absolute, found.exact, strict=True) if not exact]
        assert mean == pytest.approx(sum(inexact) / 7, rel=1e-6)  # the three exact elements add nothing


def test_the_disc_is_apart():
    """Noise in the outermost ring is seen in the full frame and not in the disc."""

    class Ring(nn.Module):
        def named_features(self, x):
            border = torch.zeros_like(x)
            border[..., 0] = 1.0
            return {"lift": x + border, "logits": x.mean((-2, -1))}

    stage = audit(Ring(), "p4").stages["lift"]
    assert min(stage.relative[1:]) > 0.05 and max(stage.disc_relative) < 1e-12


def test_turning_uses_the_definition():
    """The elements of the audit are those of `act_on_plane`: a model that answers with one corner tells which it saw."""

    class Corner(nn.Module):
        def forward(self, x):
            return x[:, 0, :2, 0]

    x = torch.arange(16.0, dtype=torch.float64).view(1, 1, 4, 4)
    found = audit_model(Corner(), x, "p4m")
    for g in range(8):
        expected = (act_on_plane(x, Group(4, True), g)[:, 0, :2, 0] - x[:, 0, :2, 0]).abs().mean()
        assert found.stages["logits"].absolute[g] == pytest.approx(float(expected))
