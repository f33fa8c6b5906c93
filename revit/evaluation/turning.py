"""Turning normalised images. What comes in at the corners is a colour that the caller names: zero would be the mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from revit.actions import act_on_plane, interpolate_plane
from revit.data.spec import DataSpec
from revit.groups import Group, rotation_matrix

Fill = float | Sequence[float]
"""A normalised colour: one value, or one per channel."""

_STEPS = 1_000_000
"""Angles are kept to a millionth of a degree."""


def normalised_black(spec: DataSpec) -> tuple[float, ...]:
    """What a black pixel is after normalisation with the mean and deviation of a dataset."""
    return tuple(-mean / std for mean, std in zip(spec.mean, spec.std, strict=True))


def turn_by_element(x: Tensor, group: Group, element: int, fill: Fill = 0.0) -> Tensor:
    """`T_g` on images [B, C, H, W]. Quarter turns and mirrors move pixels and need no fill."""
    if group.is_exact_element(element):
        return act_on_plane(x, group, element).contiguous()
    colour = fill_colour(x, fill)
    return (act_on_plane(x - colour, group, element) + colour).contiguous()


def turn_by_angle(x: Tensor, degrees: float, fill: Fill = 0.0) -> Tensor:
    """Images [B, C, H, W] turned counter-clockwise about their centre: bilinear below 90 degrees, then exact quarter turns."""
    quarters, rest = divmod(round(degrees * _STEPS) % (360 * _STEPS), 90 * _STEPS)
    if rest:
        colour = fill_colour(x, fill)
        x = interpolate_plane(x - colour, rotation_matrix(0, rest, 90 * _STEPS), "bilinear") + colour
    return torch.rot90(x, quarters, (-2, -1)).contiguous()


def fill_colour(x: Tensor, fill: Fill) -> Tensor:
    """The fill as a tensor [C, 1, 1] that fits images [B, C, H, W]."""
    values = [fill] if isinstance(fill, int | float) else list(fill)
    if len(values) not in (1, x.shape[1]):
        raise ValueError(f"fill is one value or one per channel: images have {x.shape[1]} channels, got {len(values)} values")
    return torch.tensor(values, device=x.device, dtype=x.dtype).view(-1, 1, 1)
