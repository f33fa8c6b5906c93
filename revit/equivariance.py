r"""How equivariant is a function? Tools for any function or module, ours or not.

Eq. 1 of the paper asks for `f(T_g x) = T_g f(x)`. `equivariance_error` measures the difference for every element of a group,
`prediction_consistency` counts the predictions that stay, `assert_equivariant` compares the error with a tolerance.
Images are turned by moving pixels wherever that is possible, so for p4, p4m and their subgroups the error is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from revit.actions import act_on_features, act_on_plane
from revit.groups import Group

KINDS = ("auto", "image", "features", "stacked", "invariant")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error below which a whole model counts as equivariant, by precision."""


def transform(x: Tensor, group: Group | str, element: int, *, kind: str = "auto", interpolation: str = "bilinear") -> Tensor:
    """`T_g` on whatever a tensor is: an `image` [B, C, H, W], `features` [B, C, G, H, W], `stacked` features [B, C*G, H, W] or
    an `invariant` that stays as it is. `auto` reads it off the number of axes: 4, 5, and 1 or 2."""
    group = Group.parse(group)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose {', '.join(KINDS)}")
    if kind == "auto":
        names = {1: "invariant", 2: "invariant", 4: "image", 5: "features"}
        if x.ndim not in names:
            raise ValueError(f"cannot tell how a tensor of shape {list(x.shape)} turns; give kind=, one of {KINDS[1:]}")
        kind = names[x.ndim]
    if kind == "invariant":
        return x
    if kind == "image":
        return act_on_plane(x, group, element, interpolation=interpolation)
    if kind == "features":
        return act_on_features(x, group, element, interpolation=interpolation)
    if x.shape[1] % group.order:
        raise ValueError(f"stacked features on {group} have a multiple of {group.order} channels, got {x.shape[1]}")
    return act_on_features(x.unflatten(1, (-1, group.order)), group, element, interpolation=interpolation).flatten(1, 2)


def equivariance_error(
    f: Callable[[Tensor], Any],
    x: Tensor,
    group: Group | str,
    *,
    feature: str | None = None,
    relative: bool = False,
    reduction: str = "mean",
    kind: str = "auto",
    interpolation: str = "bilinear",
    disc: bool = False,
) -> Tensor:
    r"""The difference between `f(T_g x)` and `T_g f(x)` for each element g of the group, as float64 [G].

    The paper's measure is the mean absolute difference (`reduction="mean"`); "max" is the largest. `relative` divides it by
    the mean (or largest) absolute value of `f(x)`, which shows a broken layer even where its features are small.

    - `feature` names a map of `f.named_features(x)`, such as `lift` or `pre_class`; `f` is then a model of ours.
    - `kind` says how the output turns if its shape does not (see `transform`); the input is an image or features.
    - `disc` compares only a disc about the centre (`centred_disc`), where turning by any angle moves nothing out of the frame.

    >>> blur = torch.nn.AvgPool2d(3, stride=1, padding=1)
    >>> bool(equivariance_error(blur, torch.rand(1, 1, 8, 8, dtype=torch.float64), "p4m").max() < 1e-15)
    True
    """
    group = Group.parse(group)
    if reduction not in ("mean", "max"):
        raise ValueError(f"unknown reduction {reduction!r}; choose mean, max")
    reduce = torch.mean if reduction == "mean" else torch.amax

    def output(inputs: Tensor) -> Tensor:
        if feature is None:
            return f(inputs)
        features = f.named_features(inputs)  # type: ignore[attr-defined]
        if feature not in features:
            raise ValueError(f"unknown feature {feature!r}; choose {', '.join(features)}")
        return features[feature]

    with torch.no_grad():
        upright = output(x)
        errors = []
        for element in range(group.order):
            expected = transform(upright, group, element, kind=kind, interpolation=interpolation)
            actual = output(transform(x, group, element, interpolation=interpolation).contiguous())
            if actual.shape != expected.shape:
                shapes = f"{list(actual.shape)}, expected {list(expected.shape)}"
                raise ValueError(f"under {group.element_name(element)} the output has shape {shapes}")
            actual, expected = actual.double(), expected.double()
            if disc and actual.ndim >= 4:
                inside = centred_disc(actual.shape[-2], actual.shape[-1]).to(actual.device)
                actual, expected = actual[..., inside], expected[..., inside]
            error = reduce((actual - expected).abs())
            errors.append(error / reduce(expected.abs()).clamp_min(torch.finfo(torch.float64).tiny) if relative else error)
        return torch.stack(errors)


def prediction_consistency(f: Callable[[Tensor], Tensor], x: Tensor, group: Group | str, **options: Any) -> Tensor:
    """The share of samples whose predicted class stays the same under each element of the group, as float64 [G].

    `options` are those of `transform` for the input, such as `interpolation`.
    """
    group = Group.parse(group)
    with torch.no_grad():
        upright = f(x)
        if upright.ndim != 2:
            raise ValueError(f"expected logits [B, classes], got shape {list(upright.shape)}")
        turned = [f(transform(x, group, g, **options).contiguous()) for g in range(group.order)]
        return torch.stack([(logits.argmax(1) == upright.argmax(1)).double().mean() for logits in turned])


def assert_equivariant(
    f: Callable[[Tensor], Any], x: Tensor, group: Group | str, *, tolerance: float | None = None, **options: Any
) -> None:
    """Raises `AssertionError` naming the elements whose relative error is above the tolerance (default: by precision of x)."""
    group = Group.parse(group)
    if tolerance is None:
        tolerance = TOLERANCES[x.dtype]
    errors = equivariance_error(f, x, group, **{"relative": True, "reduction": "max", **options})
    worst = [g for g in range(group.order) if not errors[g] <= tolerance]
    if worst:
        listed = "; ".join(f"{group.element_name(g)}: {errors[g]:.3g}" for g in worst)
        raise AssertionError(f"not {group} equivariant, error above {tolerance:g} under {listed}")


def centred_disc(height: int, width: int) -> Tensor:
    """True inside the disc about the centre of a map that reaches 80 % of the way to its nearest border, [H, W].

    Turned by any angle, the disc stays inside the frame; the margin keeps the zeros outside the image out of reach.
    """
    y = torch.arange(height) - (height - 1) / 2
    x = torch.arange(width) - (width - 1) / 2
    return y[:, None] ** 2 + x**2 <= (0.8 * min(height, width) / 2) ** 2
