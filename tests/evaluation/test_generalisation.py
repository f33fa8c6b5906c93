"""Random turns and every angle, on models whose answers are known."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from revit.data.randomness import uniforms
from revit.evaluation import errors_by_angle, random_transformations
from revit.evaluation.turning import turn_by_angle
from tests.evaluation.models import OrbitMean, Plain, Sides

IMAGES = (24, 1, 12, 12)


def consistency(model, x, degrees, *, part="frame", **options):
    found = errors_by_angle(model, x, degrees=degrees, **options)
    return [agreement.consistency_percent for agreement in getattr(found, part)]


def test_consistency_by_angle_of_a_known_model():
    x = torch.full((2, 1, 8, 8), -1.0)
    x[0, :, :, :3] = 1  # left
    x[1, :, :, 5:] = 1  # right
    assert consistency(Sides(), x, [0, 30, 150, 180, 330, -30, 360], fill=-1.0) == [100, 100, 0, 0, 100, 100, 100]
    assert consistency(Sides(), x, [0, 30, 180], fill=-1.0, part="disc") == [100, 100, 0]


def test_batches_do_not_matter():
    x, model, angles = torch.randn(IMAGES), Plain(), [0, 17, 45, 90, 200]
    small = consistency(model, x, angles, fill=0.5, batch_size=5)
    assert small == consistency(model, x, angles, fill=0.5, batch_size=24)
    assert small[0] == 100 and min(small) < 100
    one, two = (random_transformations(model, x, fill=0.5, versions=3, batch_size=size) for size in (5, 24))
    assert one.frame.consistency_percent == two.frame.consistency_percent
    assert one.frame.probability_difference == pytest.approx(two.frame.probability_difference, rel=1e-5)


def test_an_invariant_model_stays_at_quarter_turns_and_nowhere_else():
    found = errors_by_angle(OrbitMean(Plain()).double(), torch.rand(IMAGES), degrees=[0, 90, 180, 270, 45], fill=0.0)
    for part in (found.frame, found.disc):
        assert all(agreement.consistency_percent == 100 and agreement.logit_error < 1e-12 for agreement in part[:4])
        assert part[4].logit_error > 1e-4


def test_on_a_disc_only_the_turn_differs():
    """A function of what is outside the disc sees the same thing at every angle."""

    class Corners(nn.Module):
        def forward(self, x):
            corner = x[:, 0, 0, 0]
            return torch.stack([corner, -corner], dim=1)

    x = torch.ones(3, 1, 16, 16)
    assert consistency(Corners(), x, [45], fill=-1.0) == [0]
    assert consistency(Corners(), x, [45], fill=-1.0, part="disc") == [100]


def test_random_transformations_by_the_definition():
    """Angles, mirrors, probabilities and their differences written out again, one image at a time."""
    x, model, versions = torch.rand(5, 1, 9, 9, dtype=torch.float64), Plain(classes=3).double(), 4
    draws = uniforms(np.arange(5), 2 * versions, 7, "random transformations")
    same, mean, top = [], [], []
    with torch.no_grad():
        for i in range(5):
            p = model(x[i : i + 1]).softmax(1)[0]
            for v in range(versions):
                image = x[i : i + 1].flip(-1) if draws[i, versions + v] < 0.5 else x[i : i + 1]
                q = model(turn_by_angle(image, 360 * draws[i, v], 0.2)).softmax(1)[0]
                same.append(100.0 * (p.argmax() == q.argmax()))
                mean.append((p - q).abs().mean())
                top.append((p - q).abs()[p.argmax()])
    found = random_transformations(model, x, fill=0.2, versions=versions, seed=7)
    expected = [sum(map(float, values)) / 20 for values in (same, mean, top)]
    frame = found.frame
    assert [frame.consistency_percent, frame.probability_difference, frame.top_class_difference] == pytest.approx(expected)
    assert (found.samples, found.versions, found.mirror) == (5, 4, 0.5)


def test_mirrors_can_be_left_out():
    class Chiral(nn.Module):
        """The sense of rotation of a swirl: no turn changes it, each mirror does."""

        def forward(self, x):
            height = x.shape[-1]
            y, z = torch.meshgrid(torch.linspace(1, -1, height), torch.linspace(-1, 1, height), indexing="ij")
            angle = torch.atan2(y, z) + 6 * torch.hypot(y, z)
            found = (x[:, 0] * torch.exp(1j * angle)).sum((-2, -1)).abs()
            other = (x[:, 0] * torch.exp(1j * (torch.atan2(y, z) - 6 * torch.hypot(y, z)))).sum((-2, -1)).abs()
            return torch.stack((found, other), 1)

    y, z = torch.meshgrid(torch.linspace(1, -1, 31), torch.linspace(-1, 1, 31), indexing="ij")
    swirl = torch.cos(torch.atan2(y, z) + 6 * torch.hypot(y, z)) * (torch.hypot(y, z) < 0.9)
    x = swirl.expand(16, 1, 31, 31)
    assert random_transformations(Chiral(), x, fill=0.0, mirror=0.0).frame.consistency_percent == 100
    assert random_transformations(Chiral(), x, fill=0.0, mirror=1.0).frame.consistency_percent == 0
    assert 30 < random_transformations(Chiral(), x, fill=0.0).frame.consistency_percent < 70


def test_results_are_json_by_measure():
    found = errors_by_angle(Plain(), torch.rand(IMAGES), degrees=[0, 10], fill=0.0).to_dict()
    assert found["degrees"] == [0, 10] and found["samples"] == 24
    assert found["frame"]["consistency_percent"][0] == 100 and len(found["disc"]["logit_error"]) == 2
    random = random_transformations(Plain(), torch.rand(IMAGES), fill=0.0, versions=2).to_dict()
    assert math.isfinite(json.loads(json.dumps(random, allow_nan=False))["frame"]["top_class_difference"])
