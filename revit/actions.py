r"""What it means to turn something: the one definition of the group action.

`T_g` acts on a function on the plane by `(T_g f)(x) = f(g^-1 x)` and on a function on the group by Eq. 11 of the paper,

    (T_g F)(x, h) = F(g^-1 x, g^-1 h).

Images, feature maps and filters are all turned by the functions of this file, so a test that turns an image and a layer
that turns its filters cannot disagree. Multiples of 90 degrees and mirrors move pixels onto pixels and are exact;
every other angle is a rotation by less than 90 degrees (interpolated for images, evaluated for filters) followed by exact
quarter turns. So p4 inside p8 stays exact to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from revit.filters import kernel_grid, plane_functions
from revit.groups import Group, rotation_matrix

INTERPOLATIONS = ("bilinear", "bicubic", "nearest")


def quarter_turns(group: Group, element: int) -> tuple[bool, int, int]:
    """Writes an element as mirror (or not), then a turn by `rest / 4N` of 360 degrees (< 90), then quarter turns."""
    r, mirrored = group.split(element)
    quarters, rest = divmod(4 * r, group.rotations)
    return mirrored, rest, quarters


def act_on_plane(x: Tensor, group: Group | str, element: int, *, interpolation: str = "bilinear") -> Tensor:
    """`(T_g f)(x) = f(g^-1 x)` on the last two axes [..., H, W]; odd quarter turns exchange H and W.

    Outside the image is zero. `interpolation` matters only for angles that are not multiples of 90 degrees.
    """
    group = Group.parse(group)
    mirrored, rest, quarters = quarter_turns(group, element)
    if mirrored:
        x = x.flip(-1)
    if rest:
        x = interpolate_plane(x, rotation_matrix(0, rest, group.rotations), interpolation)
    return torch.rot90(x, quarters, (-2, -1))


def act_on_features(x: Tensor, group: Group | str, element: int, *, interpolation: str = "bilinear") -> Tensor:
    """Eq. 11, `(T_g F)(x, h) = F(g^-1 x, g^-1 h)`, on [..., G, H, W]: permute the group axis, then move the plane."""
    group = Group.parse(group)
    if x.ndim < 3 or x.shape[-3] != group.order:
        raise ValueError(f"a feature map on {group} is [..., {group.order}, H, W], got shape {list(x.shape)}")
    permutation = group.product[group.inverse[element]].to(x.device)  # h -> g^-1 h
    return act_on_plane(x.index_select(-3, permutation), group, element, interpolation=interpolation)


def interpolate_plane(x: Tensor, rotation: Tensor, mode: str) -> Tensor:
    """Samples [..., H, W] at `rotation^-1` of each pixel, about the centre, zero outside."""
    if mode not in INTERPOLATIONS:
        raise ValueError(f"unknown interpolation {mode!r}; choose {', '.join(INTERPOLATIONS)}")
    height, width = x.shape[-2:]
    rows = (height - 1) / 2 - torch.arange(height, dtype=torch.float64)  # y up
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    y, x_axis = torch.meshgrid(rows, columns, indexing="ij")
    source = torch.stack((x_axis, y), dim=-1) @ rotation  # [H, W, 2], rows times R = R^-1 on columns
    grid = torch.stack((2 * source[..., 0] / width, -2 * source[..., 1] / height), dim=-1)  # [-1, 1], y down
    flat = x.reshape(1, -1, height, width)
    grid = grid.to(x).unsqueeze(0)
    return F.grid_sample(flat, grid, mode=mode, padding_mode="zeros", align_corners=False).view(x.shape)


@dataclass(frozen=True)
class TurnTable:
    """How filters of one family and size turn under a group, as two small tables.

    The filters turned by less than 90 degrees come from one matrix each, `basis` [S, K*K, P] (None where the filter's
    parameters are its pixels and no such turn is needed); all other elements only move their entries.
    """

    basis: Tensor | None
    """[S, K*K, P]: values at the pixels of the P functions, turned by each of the S distinct turns below 90 degrees."""
    turn_of: Tensor
    """[G]: which of the S turns an element uses."""
    pixel_of: Tensor
    """[G, K*K]: which pixel of that turned filter an element's pixel shows."""
    permutation: Tensor
    """[G, G]: g^-1 h."""


@lru_cache
def turn_table(group: Group, kernel_size: int, filters: str) -> TurnTable:
    """The tables of `kernel_bank` for one family of filters (see `revit.filters`), in float64."""
    area = kernel_size**2
    turns: list[tuple[bool, int]] = []  # distinct (mirrored, rest), (False, 0) first
    turn_of, pixel_of = [], []
    pixels = torch.arange(area).view(kernel_size, kernel_size)
    for element in range(group.order):
        mirrored, rest, quarters = quarter_turns(group, element)
        if kernel_size == 1:
            turn, moved = (False, 0), pixels
        elif rest == 0 and mirrored:
            turn, moved = (False, 0), pixels.flip(-1)
        else:
            turn, moved = (mirrored, rest), pixels
        if turn not in turns:
            turns.append(turn)
        turn_of.append(turns.index(turn))
        pixel_of.append(torch.rot90(moved, quarters, (-2, -1)).flatten())
    is_pixels = filters in ("free", "interpolate") or kernel_size == 1
    basis = None
    if not (is_pixels and len(turns) == 1):
        turned = [_turned_functions(group, kernel_size, filters, *turn) for turn in turns]
        basis = torch.stack(turned)  # [S, K*K, P]
    permutation = group.product[group.inverse]
    return TurnTable(basis, torch.tensor(turn_of), torch.stack(pixel_of), permutation)


def _turned_functions(group: Group, kernel_size: int, filters: str, mirrored: bool, rest: int) -> Tensor:
    """[K*K, P]: the functions of a family after a mirror (or not) and a turn below 90 degrees."""
    rotation = rotation_matrix(0, rest, group.rotations)
    if filters == "interpolate":
        pixels = torch.eye(kernel_size**2, dtype=torch.float64).view(-1, kernel_size, kernel_size)
        pixels = pixels.flip(-1) if mirrored else pixels
        turned = interpolate_plane(pixels, rotation, "bilinear") if rest else pixels
        return turned.flatten(1).T
    points = kernel_grid(kernel_size) @ rotation  # g^-1 x: the basis is evaluated there, never interpolated
    if mirrored:
        points = points * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return plane_functions(filters, kernel_size)(points).flatten(0, 1)


def turn_index(table: TurnTable, *, lifting: bool) -> Tensor:
    """Row numbers [G, (G,) K*K] of each bank entry in the table of turned filters [S, (G,) K*K]."""
    order, area = table.pixel_of.shape
    turn = table.turn_of.unsqueeze(1) * (1 if lifting else order)  # [G, 1]
    if lifting:
        return turn * area + table.pixel_of
    field = (turn + table.permutation).unsqueeze(2)  # [G, G, 1]
    return field * area + table.pixel_of.unsqueeze(1)


def kernel_bank(weight: Tensor, basis: Tensor | None, index: Tensor) -> Tensor:
    """Turns filters into the bank of one ordinary convolution: `bank[o, g, i, h] = T_g weight[o, i, g^-1 h]`.

    weight: [O, I, G, P] -> [O, G, I, G, K*K] with the group index [G, G, K*K], or lifting
    weight: [O, I, P] -> [O, G, I, K*K] with the lifting index [G, K*K].
    """
    lifting = index.ndim == 2
    area = index.shape[-1]
    rows = weight.movedim((0, 1), (-2, -1))  # [(G,) P, O, I]
    if basis is not None:
        rows = torch.einsum("skp,...poi->s...koi", basis, rows)  # [S, (G,) K*K, O, I]
    out_fields, in_fields = weight.shape[:2]
    # Rows of O*I numbers are copied whole: a gather of single numbers would be ten times slower backwards.
    bank = rows.reshape(-1, out_fields * in_fields).index_select(0, index.flatten())
    if lifting:
        return bank.view(-1, area, out_fields, in_fields).permute(2, 0, 3, 1)  # [O, G, I, K*K]
    order = index.shape[0]
    return bank.view(order, order, area, out_fields, in_fields).permute(3, 0, 4, 1, 2)  # [O, G, I, G, K*K]
