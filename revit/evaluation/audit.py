r"""Does a model keep its promise? One pass over the elements of a group, for models of ours and any other module.

For each element g the audit compares `f(T_g x)` with `T_g f(x)`: at the first feature map (`lift`), at the last (`pre_class`)
and at the logits, and counts the samples whose predicted class stays. `consistency_by_angle` counts them for any angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revit.equivariance import TOLERANCES, transform
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.turning import Fill, fill_colour, turn_by_angle, turn_by_element
from revit.groups import Group

AUDITED_FEATURES = ("lift", "pre_class")
"""Maps of `model.named_features(x)` that are compared, where a model has them."""


@dataclass(frozen=True)
class Audit:
    """What `audit_model` found; lists have one entry per element of the group, the identity first."""

    group: str
    samples: int
    elements: tuple[str, ...]  # names: "90°", "mirror, then 90°"
    exact: tuple[bool, ...]  # whether the element moves pixels onto pixels; others include the error of interpolation
    errors: dict[str, tuple[float, ...]]  # by feature: mean absolute difference / mean absolute value
    largest_errors: dict[str, tuple[float, ...]]  # by feature: largest difference / largest absolute value
    consistency: tuple[float, ...]  # share of samples that keep their predicted class, 0 to 1
    mean_consistency_percent: float | None  # over all elements but the identity; None if there is no other
    tolerance: float  # of the precision that the model computes in

    @property
    def passed(self) -> bool:
        """Whether every largest error under exact elements is within the tolerance."""
        return all(
            error <= self.tolerance
            for errors in self.largest_errors.values()
            for error, exact in zip(errors, self.exact, strict=True)
            if exact
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict."""
        return {**asdict(self), "passed": self.passed}


def audit_model(model: nn.Module, x: Tensor, group: Group | str, *, fill: Fill = 0.0, batch_size: int = 64) -> Audit:
    """Compares a model with itself on turned and mirrored images [N, C, H, W], which come normalised.

    Feature maps are compared where the model has `named_features`, and where they are maps on this group: the features of a
    p4 model cannot turn with p4m, its logits can. `fill` is what elements that are not exact turn in at the corners; see
    `normalised_black`. The errors are those of `revit.equivariance_error` over all samples, in batches.
    """
    group = Group.parse(group)
    _check_images(x)
    differences: dict[str, _Difference] = {}
    kept = torch.zeros(group.order, dtype=torch.float64)
    device, dtype = place_of(model)
    with evaluating(model):
        for batch in x.split(batch_size):
            batch = batch.to(device, dtype)
            upright = _outputs(model, batch, group)
            for element in range(group.order):
                turned = _outputs(model, turn_by_element(batch, group, element, fill), group)
                for name, value in upright.items():
                    difference = differences.setdefault(name, _Difference(group.order))
                    difference.add(element, turned[name], transform(value, group, element))
                kept[element] += (turned["logits"].argmax(1) == upright["logits"].argmax(1)).sum().cpu()
    consistency = tuple((kept / len(x)).tolist())
    others = consistency[1:]
    return Audit(
        group=group.name,
        samples=len(x),
        elements=tuple(group.element_name(g) for g in range(group.order)),
        exact=tuple(group.is_exact_element(g) for g in range(group.order)),
        errors={name: difference.mean() for name, difference in differences.items()},
        largest_errors={name: difference.largest() for name, difference in differences.items()},
        consistency=consistency,
        mean_consistency_percent=100 * sum(others) / len(others) if others else None,
        tolerance=TOLERANCES[dtype],
    )


def consistency_by_angle(
    model: nn.Module, x: Tensor, degrees: Sequence[float], *, fill: Fill, disc: bool = False, batch_size: int = 64
) -> tuple[float, ...]:
    """The share of normalised images [N, C, H, W], 0 to 1, whose predicted class stays when they turn by each angle.

    Images turn counter-clockwise in their full frame and show `fill` where corners turn in: `normalised_black(spec)`. With
    `disc` only the largest disc about the centre is shown, to the upright images as well, so that nothing but the turn differs.
    """
    _check_images(x)
    kept = [0] * len(degrees)
    device, dtype = place_of(model)
    with evaluating(model):
        for batch in x.split(batch_size):
            batch = batch.to(device, dtype)
            upright = _classes(model(_on_disc(batch, fill) if disc else batch))
            for i, angle in enumerate(degrees):
                turned = turn_by_angle(batch, angle, fill)
                kept[i] += int((_classes(model(_on_disc(turned, fill) if disc else turned)) == upright).sum())
    return tuple(count / len(x) for count in kept)


class _Difference:
    """Sums and maxima of one feature over batches, for each element."""

    def __init__(self, order: int) -> None:
        self.sums = torch.zeros(2, order, dtype=torch.float64)  # of differences, of values
        self.maxima = torch.zeros(2, order, dtype=torch.float64)

    def add(self, element: int, actual: Tensor, expected: Tensor) -> None:
        if actual.shape != expected.shape:
            raise ValueError(f"the turned output has shape {list(actual.shape)}, expected {list(expected.shape)}")
        actual, expected = actual.double(), expected.double()
        pair = torch.stack(((actual - expected).abs().flatten(), expected.abs().flatten()))
        self.sums[:, element] += pair.sum(1).cpu()
        self.maxima[:, element] = torch.maximum(self.maxima[:, element], pair.amax(1).cpu())

    def mean(self) -> tuple[float, ...]:
        return _quotients(self.sums)

    def largest(self) -> tuple[float, ...]:
        return _quotients(self.maxima)


def _quotients(pair: Tensor) -> tuple[float, ...]:
    return tuple((pair[0] / pair[1].clamp_min(torch.finfo(torch.float64).tiny)).tolist())


def _outputs(model: nn.Module, x: Tensor, group: Group) -> dict[str, Tensor]:
    """The logits, and before them the audited features that a group of this order can turn."""
    if not hasattr(model, "named_features"):
        logits = model(x)
        _classes(logits)
        return {"logits": logits}
    features: dict[str, Tensor] = model.named_features(x)  # type: ignore[operator]
    maps = {name: features[name] for name in AUDITED_FEATURES if name in features}
    turning = {n: m for n, m in maps.items() if m.ndim == 4 or (m.ndim == 5 and m.shape[2] == group.order)}
    return {**turning, "logits": features["logits"]}


def _classes(logits: Tensor) -> Tensor:
    if logits.ndim != 2:
        raise ValueError(f"expected a model that returns logits [B, classes], got shape {list(logits.shape)}")
    return logits.argmax(1)


def _on_disc(x: Tensor, fill: Fill) -> Tensor:
    """Fill outside the disc through the outermost pixel centres: inside it, turning never reaches over the border."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) - (height - 1) / 2
    columns = torch.arange(width, device=x.device) - (width - 1) / 2
    inside = rows[:, None] ** 2 + columns**2 <= ((min(height, width) - 1) / 2) ** 2
    return torch.where(inside, x, fill_colour(x, fill))


def _check_images(x: Tensor) -> None:
    if x.ndim != 4 or len(x) == 0:
        raise ValueError(f"expected images [N, C, H, W], at least one, got shape {list(x.shape)}")
