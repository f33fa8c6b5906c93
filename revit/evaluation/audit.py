r"""Does a model keep its promise? One pass over the elements of a group, for models of ours and any other module.

The protocol of the paper: for each element g but the identity, `f(T_g x)` is compared with `T_g f(x)` at every stage of the
model (`revit.evaluation.stages`), as the mean absolute difference over samples, channels, elements and positions; the mean
and the population standard deviation over the elements are what its tables print. Beside it stand the relative error, because
small features hide a broken layer, the largest difference, because a mean hides a broken pixel, and both inside the central
disc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from revit.equivariance import TOLERANCES, centred_disc, transform
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.stages import OUTPUT, answer_kind, kinds_of, read_stages
from revit.evaluation.turning import Fill, turn_by_element
from revit.groups import Group

SAMPLES, BATCH = 1024, 16
"""Of the paper's protocol."""


@dataclass(frozen=True)
class StageErrors:
    """How far one stage is from turning with its input; one entry per element of the group, the identity first."""

    kind: str  # how it turns: features, stacked, image, invariant
    absolute: tuple[float, ...]  # mean |f(T_g x) - T_g f(x)|
    relative: tuple[float, ...]  # the same, divided by mean |f(x)|
    largest: tuple[float, ...]  # largest difference / largest absolute value
    disc_absolute: tuple[float, ...] | None  # inside the central disc of a map; None where there is no plane
    disc_relative: tuple[float, ...] | None

    def over_elements(self, measure: str = "absolute") -> tuple[float | None, float | None]:
        """Mean and population standard deviation of a measure over all elements but the identity: what the tables print."""
        errors = getattr(self, measure)
        return mean_and_deviation(errors[1:]) if errors is not None else (None, None)


@dataclass(frozen=True)
class Audit:
    """What `audit_model` found; tuples have one entry per element of the group, the identity first."""

    group: str
    samples: int
    elements: tuple[str, ...]  # names: "90°", "mirror, then 90°"
    exact: tuple[bool, ...]  # whether the element moves pixels onto pixels; others include the error of interpolation
    stages: dict[str, StageErrors]  # in the order in which they are computed, `logits` last
    claimed: tuple[str, ...]  # stages that the verdict is about; the others are there to find the layer that breaks
    consistency: tuple[float, ...]  # share of samples (of a map of classes: of pixels) that keep their predicted class, 0 to 1
    tolerance: float  # of the precision that the model computes in

    @property
    def mean_consistency_percent(self) -> float | None:
        """Over all elements but the identity; None if there is no other."""
        return 100 * fmean(self.consistency[1:]) if len(self.consistency) > 1 else None

    @property
    def passed(self) -> bool:
        """Whether every largest error under exact elements is within the tolerance."""
        return self.broken_stage() is None

    def broken_stage(self, tolerance: float | None = None) -> str | None:
        """The first stage that does not turn with the input under an element that could be exact: the layer to look at.

        None if all claimed stages turn: what an invariant answer was computed from is then nobody's business.
        """
        limit = self.tolerance if tolerance is None else tolerance
        broken = [name for name in self.stages if not self.worst(name) <= limit]
        return broken[0] if set(broken) & set(self.claimed) else None

    def worst(self, stage: str) -> float:
        """The largest error of a stage under the elements that move pixels onto pixels."""
        errors = [error for error, exact in zip(self.stages[stage].largest, self.exact, strict=True) if exact]
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict and the figures of the paper's tables."""
        values = asdict(self)
        for name, stage in self.stages.items():
            for measure in ("absolute", "relative", "disc_absolute", "disc_relative"):
                mean, deviation = stage.over_elements(measure)
                values["stages"][name] |= {f"{measure}_mean": mean, f"{measure}_std": deviation}
        mean, deviation = mean_and_deviation([100 * share for share in self.consistency[1:]])
        values |= {"consistency_percent_mean": mean, "consistency_percent_std": deviation}
        return finite({**values, "passed": self.passed, "broken_stage": self.broken_stage()})


def audit_model(
    model: nn.Module, x: Tensor, group: Group | str, *, fill: Fill = 0.0, batch_size: int = BATCH, every_layer: bool = False
) -> Audit:
    """Compares a model with itself on turned and mirrored images [N, C, H, W], which come normalised.

    A model with `named_features` claims that each of them turns. Any other module claims that its answers stay (if they are
    maps of classes, [B, K, h, w]: that they turn with the image), and `every_layer` makes it claim more. Stages that are no
    maps on this group are left out: the features of a p4 model cannot turn with p4m, its logits can. `fill` is what elements
    that are not exact turn in at the corners; see `normalised_black`.
    """
    group = Group.parse(group)
    check_images(x)
    differences: dict[tuple[str, str], _Difference] = {}  # by stage and the way it turns
    kept = torch.zeros(group.order, dtype=torch.float64)
    device, dtype = place_of(model)
    with evaluating(model):
        for batch in x.split(batch_size):
            batch = batch.to(device, dtype)
            upright = read_stages(model, batch)
            for element in range(group.order):
                turned = read_stages(model, turn_by_element(batch, group, element, fill))
                for name, value in upright.items():
                    for kind in (answer_kind(value),) if name == OUTPUT else kinds_of(value, group):
                        difference = differences.setdefault((name, kind), _Difference(group.order))
                        difference.add(element, turned.get(name), transform(value, group, element, kind=kind))
                kept[element] += _kept_classes(upright[OUTPUT], turned[OUTPUT], group, element)
    exact = tuple(group.is_exact_element(g) for g in range(group.order))
    stages = _best_readings(differences, exact)
    return Audit(
        group=group.name,
        samples=len(x),
        elements=tuple(group.element_name(g) for g in range(group.order)),
        exact=exact,
        stages=stages,
        claimed=tuple(stages) if every_layer or hasattr(model, "named_features") else (OUTPUT,),
        consistency=tuple((kept / len(x)).tolist()),
        tolerance=TOLERANCES[dtype],
    )


def _kept_classes(upright: Tensor, turned: Tensor, group: Group, element: int) -> float:
    """How many samples keep their class; of maps of classes, the shares of the pixels that do are added up."""
    expected = transform(upright, group, element, kind=answer_kind(upright))
    if turned.shape != expected.shape:
        return 0.0
    same = (turned.argmax(1) == expected.argmax(1)).double()
    return float((same.flatten(1).mean(1) if same.ndim > 1 else same).sum())


class _Difference:
    """Sums and maxima of one stage over batches, for each element; rows are differences and values."""

    def __init__(self, order: int) -> None:
        self.sums, self.disc_sums = torch.zeros(2, order, dtype=torch.float64), torch.zeros(2, order, dtype=torch.float64)
        self.maxima = torch.zeros(2, order, dtype=torch.float64)
        self.counts, self.disc_counts = torch.zeros(order), torch.zeros(order)
        self.fits = True  # whether the turned output had the turned shape

    def add(self, element: int, actual: Tensor | None, expected: Tensor) -> None:
        if actual is None or actual.shape != expected.shape:
            self.fits = False
            return
        pair = torch.stack(((actual - expected).abs(), expected.abs()))
        flat = pair.flatten(1)
        self.sums[:, element] += flat.sum(1, dtype=torch.float64).cpu()
        self.maxima[:, element] = torch.maximum(self.maxima[:, element], flat.amax(1).double().cpu())
        self.counts[element] += actual.numel()
        if actual.ndim >= 4:
            inside = pair[..., centred_disc(*actual.shape[-2:]).to(actual.device)].flatten(1)
            self.disc_sums[:, element] += inside.sum(1, dtype=torch.float64).cpu()
            self.disc_counts[element] += inside.shape[1]

    def errors(self, kind: str) -> StageErrors:
        has_disc = bool(self.disc_counts.any())
        return StageErrors(
            kind=kind,
            absolute=tuple((self.sums[0] / self.counts).tolist()),
            relative=_quotients(self.sums),
            largest=_quotients(self.maxima),
            disc_absolute=tuple((self.disc_sums[0] / self.disc_counts).tolist()) if has_disc else None,
            disc_relative=_quotients(self.disc_sums) if has_disc else None,
        )


def _best_readings(differences: dict[tuple[str, str], _Difference], exact: tuple[bool, ...]) -> dict[str, StageErrors]:
    """Each stage under the action that it follows best; one whose shape does not turn is infinitely far from turning."""
    stages: dict[str, StageErrors] = {}

    def badness(errors: StageErrors) -> float:
        return sum(error for error, is_exact in zip(errors.relative, exact, strict=True) if is_exact or not any(exact[1:]))

    for (name, kind), difference in differences.items():
        if difference.fits:
            found = difference.errors(kind)
        else:
            never = (0.0,) + (math.inf,) * (len(exact) - 1)
            found = StageErrors(kind, never, never, never, None, None)
        if name not in stages or badness(found) < badness(stages[name]):
            stages[name] = found
    return stages


def _quotients(pair: Tensor) -> tuple[float, ...]:
    return tuple((pair[0] / pair[1].clamp_min(torch.finfo(torch.float64).tiny)).tolist())


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and population standard deviation; nothing if there are no values, as for the trivial group."""
    if not values:
        return None, None
    return (fmean(values), pstdev(values)) if all(map(math.isfinite, values)) else (math.inf, math.inf)


def finite(value: Any) -> Any:
    """The same value for JSON, which has no infinity and no NaN: nothing in their place."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_images(x: Tensor) -> None:
    if x.ndim != 4 or len(x) == 0:
        raise ValueError(f"expected images [N, C, H, W], at least one, got shape {list(x.shape)}")
