r"""Turns that no group contains: what is left of invariance at random angles and at every degree.

The paper turns each sample by an angle drawn uniformly from [0°, 360°) and mirrors it with probability 1/2, several times, and
compares predictions and class probabilities. It does not say how often nor which probability: here eight versions, and both the
mean over the classes and the class that was predicted. Everything is measured in the full frame, where corners turn in and out,
and with only the central disc shown, where nothing but the turn differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from revit.data.randomness import uniforms
from revit.equivariance import centred_disc
from revit.evaluation.audit import BATCH, check_images
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.stages import check_logits
from revit.evaluation.turning import Fill, fill_colour, turn_by_angle

VERSIONS = 8


@dataclass(frozen=True)
class Agreement:
    """How alike the answers for images and for their turned versions are."""

    consistency_percent: float  # versions that keep the predicted class; of maps of classes, pixels in the central disc that do
    probability_difference: float  # |p(x) - p(T x)|, mean over the classes
    top_class_difference: float  # the same of the class that is predicted for x
    logit_error: float  # mean |z(x) - z(T x)| / mean |z(x)|


@dataclass(frozen=True)
class RandomTurns:
    """What `random_transformations` found."""

    samples: int
    versions: int
    mirror: float
    seed: int
    frame: Agreement
    disc: Agreement

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ByAngle:
    """What `errors_by_angle` found: one entry per angle, in degrees counter-clockwise."""

    samples: int
    degrees: tuple[float, ...]
    frame: tuple[Agreement, ...]
    disc: tuple[Agreement, ...]

    def to_dict(self) -> dict[str, Any]:
        """Lists by measure, which are shorter to read than a list of records."""
        measures = list(Agreement.__dataclass_fields__)
        values: dict[str, Any] = {"samples": self.samples, "degrees": list(self.degrees)}
        for name, found in (("frame", self.frame), ("disc", self.disc)):
            values[name] = {measure: [getattr(agreement, measure) for agreement in found] for measure in measures}
        return values


def random_transformations(
    model: nn.Module, x: Tensor, *, fill: Fill, versions: int = VERSIONS, mirror: float = 0.5, seed: int = 0,
    batch_size: int = BATCH,
) -> RandomTurns:  # fmt: skip
    """The protocol of the paper's Table 10 on normalised images [N, C, H, W]: uniform angles, mirrors with a probability.

    The angles are a function of the seed, the number of the sample and of the version: the same for every model.
    """
    check_images(x)
    draws = uniforms(np.arange(len(x)), 2 * versions, seed, "random transformations")  # [N, 2 * versions]

    def turned(batch: Tensor, first: int, version: int, fill: Fill) -> Tensor:
        rows = draws[first : first + len(batch)]
        images = []
        for image, angle, chance in zip(batch, rows[:, version], rows[:, versions + version], strict=True):
            image = image.flip(-1) if chance < mirror else image
            images.append(turn_by_angle(image[None], 360 * float(angle), fill))
        return torch.cat(images)

    frame, disc = (_compare(model, x, turned, versions, fill, shown, batch_size) for shown in (False, True))
    return RandomTurns(len(x), versions, mirror, seed, frame.over_all(), disc.over_all())


def errors_by_angle(
    model: nn.Module, x: Tensor, *, fill: Fill, degrees: Sequence[float] = range(360), batch_size: int = BATCH
) -> ByAngle:
    """What a turn by each angle does to the answers for normalised images [N, C, H, W]."""
    check_images(x)

    def turned(batch: Tensor, first: int, version: int, fill: Fill) -> Tensor:
        return turn_by_angle(batch, degrees[version], fill)

    frame, disc = (_compare(model, x, turned, len(degrees), fill, shown, batch_size) for shown in (False, True))
    return ByAngle(len(x), tuple(map(float, degrees)), frame.by_version(), disc.by_version())


class _Sums:
    """Sums over samples, one row a version: kept classes, probability differences, logit differences; and counts."""

    def __init__(self, versions: int) -> None:
        self.sums = torch.zeros(versions, 4, dtype=torch.float64)
        self.values = 0.0  # |z(x)|
        self.samples = 0

    def add(self, version: int, upright: Tensor, turned: Tensor) -> None:
        before, after = upright.double().softmax(1), turned.double().softmax(1)
        top = upright.argmax(1, keepdim=True)
        difference = (before - after).abs()
        kept = (turned.argmax(1, keepdim=True) == top).double().sum()
        logits = (upright.double() - turned.double()).abs().mean(1).sum()
        found = torch.stack((kept, difference.mean(1).sum(), difference.gather(1, top).sum(), logits))
        self.sums[version] += found.cpu()

    def over_all(self) -> Agreement:
        return self._agreement(self.sums.mean(0))

    def by_version(self) -> tuple[Agreement, ...]:
        return tuple(self._agreement(row) for row in self.sums)

    def _agreement(self, row: Tensor) -> Agreement:
        kept, mean, top, logits = row.tolist()
        return Agreement(100 * kept / self.samples, mean / self.samples, top / self.samples, logits / max(self.values, 1e-300))


def _compare(
    model: nn.Module, x: Tensor, turned: Callable[[Tensor, int, int, Fill], Tensor], versions: int, fill: Fill, disc: bool,
    batch_size: int,
) -> _Sums:  # fmt: skip
    """Maps of classes turn with the image; they are compared inside the central disc, which no turn moves out of the frame."""
    sums = _Sums(versions)
    device, dtype = place_of(model)
    with evaluating(model):
        for first in range(0, len(x), batch_size):
            batch = x[first : first + batch_size].to(device, dtype)
            upright = model(on_disc(batch, fill) if disc else batch)
            check_logits(upright, len(batch))
            sums.samples += len(_answers(upright))
            sums.values += float(_answers(upright).double().abs().mean(1).sum())
            for version in range(versions):
                images = turned(batch, first, version, fill)
                expected = turned(upright, first, version, 0.0) if upright.ndim == 4 else upright
                sums.add(version, _answers(expected), _answers(model(on_disc(images, fill) if disc else images)))
    return sums


def _answers(logits: Tensor) -> Tensor:
    """Logits [B, K] as they are; of maps [B, K, h, w] those of the pixels inside the central disc, [B * pixels, K]."""
    if logits.ndim == 2:
        return logits
    inside = centred_disc(logits.shape[-2], logits.shape[-1]).to(logits.device)
    return logits[..., inside].movedim(1, -1).flatten(0, -2)


def on_disc(x: Tensor, fill: Fill) -> Tensor:
    """Fill outside the disc through the outermost pixel centres: inside it, turning never reaches over the border."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) - (height - 1) / 2
    columns = torch.arange(width, device=x.device) - (width - 1) / 2
    inside = rows[:, None] ** 2 + columns**2 <= ((min(height, width) - 1) / 2) ** 2
    return torch.where(inside, x, fill_colour(x, fill))
