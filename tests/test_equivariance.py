"""The tools that judge everything else must themselves fail where they should."""

import pytest
import torch
from torch import nn

from revit.actions import act_on_features, act_on_plane
from revit.equivariance import assert_equivariant, centred_disc, equivariance_error, prediction_consistency, transform
from revit.groups import Group
from revit.models import create_model
from revit.nn import LiftingConv


def blurred_noise(count, size, sigma=1.0):
    """Noise without the frequencies that no rotation of a grid can keep."""
    radius = torch.arange(-6, 7, dtype=torch.float64)
    kernel = torch.exp(-(radius**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    x = torch.randn(count, 1, size, size, dtype=torch.float64)
    x = nn.functional.conv2d(x, kernel, padding=(0, 6))
    return nn.functional.conv2d(x, kernel.transpose(2, 3), padding=(6, 0))


class Shifted(nn.Module):
    """Equivariant but for a shift by one pixel: a subtly wrong action."""

    def forward(self, x):
        return x.roll(1, -1)


class OneSided(nn.Module):
    """A symmetric filter behind padding at the far end only."""

    def forward(self, x):
        return nn.functional.avg_pool2d(nn.functional.pad(x, (0, 1, 0, 1)), 2)


@pytest.mark.parametrize(
    "broken",
    [nn.Conv2d(2, 2, 3, padding=1), Shifted(), OneSided(), nn.AvgPool2d(2, 2)],
    ids=["plain convolution", "shifted action", "one-sided padding", "asymmetric stride"],
)
def test_it_fails_what_is_not_equivariant(broken):
    x = torch.randn(2, 2, 9, 9, dtype=torch.float64)
    errors = equivariance_error(broken.double(), x, "p4m", relative=True)
    assert errors[0] == 0 and errors[1:].min() >= 0 and errors.max() > 0.01
    with pytest.raises(AssertionError, match=r"not p4m equivariant, error above 1e-10 under .*90°: "):
        assert_equivariant(broken, x, "p4m")


def test_it_fails_a_wrong_group():
    lift = LiftingConv("p4", 2, 3, 3, padding=1).double()
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    assert_equivariant(lift, x, "p4")
    with pytest.raises(ValueError, match=r"feature map on p4m is \[..., 8, H, W\], got shape \[1, 3, 4, 6, 6\]"):
        equivariance_error(lift, x, "p4m")
    mirrored = LiftingConv("p2m", 2, 3, 3, padding=1).double()  # as many elements as p4, but others
    assert equivariance_error(mirrored, x, "p4", relative=True).max() > 0.1


def test_it_passes_a_function_that_is_equivariant_by_hand():
    def laplacian(x):
        x = nn.functional.pad(x, (1, 1, 1, 1))
        return x[..., 2:, 1:-1] + x[..., :-2, 1:-1] + x[..., 1:-1, 2:] + x[..., 1:-1, :-2] - 4 * x[..., 1:-1, 1:-1]

    assert_equivariant(laplacian, torch.randn(1, 1, 6, 8, dtype=torch.float64), "p4m")
    assert_equivariant(lambda x: x.amax(dim=(1, 2, 3)), torch.randn(2, 3, 5, 5), "p4m")


def test_errors_are_those_of_the_definition():
    f = nn.Conv2d(1, 2, 3, padding=1).double()
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    expected = [(f(act_on_plane(x, "p4", g)) - act_on_plane(f(x), "p4", g)).abs() for g in range(4)]
    torch.testing.assert_close(equivariance_error(f, x, "p4"), torch.stack([e.mean() for e in expected]).detach())
    torch.testing.assert_close(
        equivariance_error(f, x, "p4", reduction="max"), torch.stack([e.amax() for e in expected]).detach()
    )
    relative = torch.stack([e.mean() for e in expected]).detach() / f(x).abs().mean().detach()
    torch.testing.assert_close(equivariance_error(f, x, "p4", relative=True), relative)


def test_error_at_named_features():
    model = create_model("revit_tiny", group="p4", in_chans=1).double().eval()
    x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    names = list(model.named_features(x))
    assert names == ["lift", "stages.0.blocks.0", "stages.0.blocks.1", "stages.0.blocks.2", "pre_class", "logits"]
    for name in names:
        assert equivariance_error(model, x, "p4", feature=name, relative=True).max() < 1e-12
    with pytest.raises(ValueError, match="unknown feature 'stem'; choose lift, stages.0.blocks.0"):
        equivariance_error(model, x, "p4", feature="stem")


def test_transform_knows_what_turns():
    features = torch.randn(2, 3, 4, 5, 5)
    assert torch.equal(transform(features, "p4", 1), act_on_features(features, "p4", 1))
    stacked = transform(features.flatten(1, 2), "p4", 1, kind="stacked")
    assert torch.equal(stacked.unflatten(1, (3, 4)), act_on_features(features, "p4", 1))
    assert torch.equal(transform(features[:, 0], "p4", 1), act_on_plane(features[:, 0], "p4", 1))
    logits = torch.randn(2, 10)
    assert transform(logits, "p4", 1) is logits
    for call, message in [
        (lambda: transform(torch.zeros(2, 3, 4), "p4", 1), r"cannot tell how a tensor of shape \[2, 3, 4\] turns; give kind="),
        (lambda: transform(logits, "p4", 1, kind="vector"), "unknown kind 'vector'; choose auto, image"),
        (lambda: transform(torch.zeros(1, 6, 5, 5), "p4", 1, kind="stacked"), "multiple of 4 channels, got 6"),
        (lambda: equivariance_error(nn.Identity(), logits[..., None, None], "p4", reduction="sum"), "unknown reduction 'sum'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_output_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"under 90° the output has shape \[1, 1, 4, 6\], expected \[1, 1, 6, 4\]"):
        equivariance_error(lambda x: x[..., :4, :], torch.zeros(1, 1, 6, 6), "p4")


def test_prediction_consistency():
    x = torch.rand(16, 1, 8, 8)
    invariant = create_model("revit_tiny", group="p4m", in_chans=1).eval()
    assert torch.equal(prediction_consistency(invariant, x, "p4m"), torch.ones(8, dtype=torch.float64))

    def left_or_right(x):
        return torch.stack([x[..., : x.shape[-1] // 2].sum((1, 2, 3)), x[..., x.shape[-1] // 2 :].sum((1, 2, 3))], dim=1)

    consistency = prediction_consistency(left_or_right, x, "p4m")
    assert consistency[0] == 1 and consistency[2] == 0 and consistency[4] == 0  # half a turn and the mirror swap the sides
    with pytest.raises(ValueError, match=r"expected logits \[B, classes\]"):
        prediction_consistency(nn.Identity(), x, "p4m")


@pytest.mark.parametrize("kernel_size", [3, 5, 7])
@pytest.mark.parametrize("filters", ["steerable", "rbf"])
def test_p8_bandlimit(filters, kernel_size):
    """At 45 degrees, on smooth noise, inside the disc: the relative error of a lifting layer is at most 0.10."""
    lift = LiftingConv("p8", 1, 16, kernel_size, padding=kernel_size // 2, filters=filters, bias=False).double()
    errors = equivariance_error(lift, blurred_noise(8, 29), "p8", relative=True, disc=True)
    assert errors[1::2].max() <= 0.10
    assert errors[::2].max() <= 1e-12


@pytest.mark.parametrize("kernel_size", [3, 5, 7])
def test_interp_baseline_fails(kernel_size):
    """Free filters turned by interpolation must fail the same test: it guards the test above."""
    options = {"padding": kernel_size // 2, "filters": "interpolate", "bias": False}
    lift = LiftingConv("p8", 1, 16, kernel_size, **options).double()
    errors = equivariance_error(lift, blurred_noise(8, 29), "p8", relative=True, disc=True)
    assert errors[1::2].min() > 0.2


@pytest.mark.parametrize(("group", "expected"), [("p8", (3 / 4) ** 0.5), ("p12", (3 / 8) ** 0.5)])
def test_protocol_std_ratio(group, expected):
    """3 exact and 4 (8) equally inexact elements: population std / mean over the non-identity ones is 0.866 (0.612)."""
    lift = LiftingConv(group, 1, 16, 5, padding=2, bias=False).double()
    errors = equivariance_error(lift, blurred_noise(32, 29), group)[1:]
    assert errors.std(unbiased=False) / errors.mean() == pytest.approx(expected, abs=0.02)


def test_centred_disc():
    disc = centred_disc(10, 20)
    assert disc[4:6, 9:11].all() and not disc[0].any() and not disc[:, :5].any()
    assert torch.equal(disc, disc.flip(0)) and torch.equal(disc, disc.flip(1))


def test_groups_can_be_given_by_name_or_value():
    x = torch.randn(1, 1, 4, 4)
    assert torch.equal(equivariance_error(nn.ReLU(), x, "p4"), equivariance_error(nn.ReLU(), x, Group(4)))
