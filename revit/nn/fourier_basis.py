r"""The real Fourier basis of a group, in which a group-linear map is a few small matrices instead of one large one.

A group-linear map `out(g) = sum_h W(g^-1 h) x(h)` multiplies |G| x |G| pairs of elements for each pair of fields. For a real
irreducible representation rho, orthogonal and of dimension d, put

    x^(rho) = sum_h x(h) rho(h),    W^(rho) = sum_k W(k) rho(k)^T    [d, d],

then `out^(rho) = x^(rho) W^(rho)`: insert h = g k. Rows of x^ never meet, so one block costs d^2 products for each row. Mirrors
and rotations (D_N) have d rows in a block; rotations alone (C_N) turn by pairs, whose second row repeats the first one. That is
6 instead of 16 units of work for p4, 14 of 64 for p8, 12 of 64 for p4m and 28 of 256 for p8m; the basis is orthogonal, so it
also takes the result back.

A group convolution becomes one if its filters are combinations of functions b_q that turn into each other,
`T_g b_p = sum_q D(g)[q, p] b_q`. Every map x(h) is convolved with the functions as its own element sees them, `T_h b_q`. Then
`T_g b_p = T_h T_{h^-1 g} b_p` leaves a group-linear map with the weights `sum_p D(k^-1)[q, p] W(k)[p]`, k = g^-1 h: the number
of functions times the units above, instead of K^2 |G|^2, and no turned copy of a filter. At 5 x 5 with 11 steerable functions
that is 66 instead of 400 for p4 and 330 instead of 6,400 for p16.

`revit.nn.fourier` computes with these matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from revit.actions import kernel_bank, turn_index, turn_table
from revit.groups import Group
from revit.nn.tables import table


class Blocks(NamedTuple):
    """All irreducible representations of one dimension d: n blocks with `rows` rows each."""

    basis: Tensor
    """[n, rows, d, G]: the orthonormal functions of the group that make the entries of x^."""
    spectrum: Tensor
    """[n, d, d, G]: `W^[b, c] = sum_k spectrum[b, c, k] W(k)`, the entry that takes column c of x^ to column b."""

    @property
    def units(self) -> int:
        """Products for each pair of fields and position."""
        count, rows, dim, _ = self.basis.shape
        return count * rows * dim**2


@table
def fourier_blocks(group: Group) -> tuple[Blocks, ...]:
    """The blocks of a group, of dimension 1 and, if there are any, of dimension 2 (float64)."""
    turns = range(1, (group.rotations + 1) // 2)
    signs = [0] + ([group.rotations // 2] if group.rotations % 2 == 0 else [])
    parities = (1, -1) if group.reflections else (1,)
    ones = [[[_sign(group, g, k, parity)] for g in range(group.order)] for k in signs for parity in parities]
    found = [_blocks(torch.tensor(ones, dtype=torch.float64).unsqueeze(-1), rows=1)]
    if turns:
        pairs = torch.stack([torch.stack([_turn(group, g, k) for g in range(group.order)]) for k in turns])
        found.append(_blocks(pairs, rows=2 if group.reflections else 1))
    return tuple(found)


def weight_blocks(weight: Tensor, group: Group) -> list[Tensor]:
    """What weights [O, I, G] are in the basis of the group: matrices [n*rows, d*O, d*I] for each dimension d."""
    return [_spectrum(weight, part).repeat_interleave(part.basis.shape[1], dim=0) for part in fourier_blocks(group)]


def _spectrum(weight: Tensor, part: Blocks) -> Tensor:
    """[O, I, G] -> [n, d*O, d*I]."""
    return torch.einsum("nbck,oik->nboci", part.spectrum.to(weight), weight).flatten(3).flatten(1, 2)


def change_blocks(weight: Tensor, group: Group, filters: str, kernel_size: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Filters [O, I, G, P] whose matrices in the basis of the group, a batch [n, d*O, d*I*Q] for each dimension d, were
    changed: all of them together are the bank, so what makes them orthogonal makes the group convolution so."""
    turns = fourier_frames(group, kernel_size, filters).turns.to(weight)
    fields, order = len(weight), group.order
    seen = torch.einsum("kqp,oikp->oiqk", turns, weight)
    flat, changed = seen.flatten(1, 2), torch.zeros_like(seen).flatten(1, 2)
    for part in fourier_blocks(group):
        dim, rows = part.basis.shape[2], part.basis.shape[1]
        blocks = change(_spectrum(flat, part)).unflatten(2, (dim, -1)).unflatten(1, (dim, fields))
        changed += torch.einsum("nbck,nboci->oik", part.spectrum.to(weight), blocks) * (rows / order)  # orthogonality of rho
    return torch.einsum("kpq,oiqk->oikp", turns[group.inverse], changed.view_as(seen))


class Frames(NamedTuple):
    """The functions of filters as each element sees them, and how they turn into each other (float64)."""

    functions: Tensor
    """[G, Q, K, K]: `T_h b_q`."""
    turns: Tensor
    """[G, Q, P]: `D(k^-1)`, for each k."""


@table
def fourier_frames(group: Group, kernel_size: int, filters: str) -> Frames:
    """Raises `ValueError` for filters that do not turn into each other, such as pixels turned by 45 degrees."""
    table = turn_table(group, kernel_size, filters)
    count = kernel_size**2 if table.basis is None else table.basis.shape[-1]
    identity = torch.eye(count, dtype=torch.float64).unsqueeze(1)  # [Q, 1, P]
    turned = kernel_bank(identity, table.basis, turn_index(table, lifting=True))[:, :, 0].permute(1, 2, 0)  # [G, K*K, Q]
    turns = torch.linalg.pinv(turned[0]) @ turned  # D(g)
    missed = turned[0] @ turns - turned
    broken = torch.einsum("gab,hbc->ghac", turns, turns) - turns[group.product]
    if max(missed.abs().max(), broken.abs().max()) > 1e-9:
        raise ValueError(f"{filters} filters do not turn into each other under {group}: choose dense, or steerable filters")
    functions = turned.mT.unflatten(-1, (kernel_size, kernel_size))
    return Frames(functions.contiguous(), turns[group.inverse].contiguous())


def filter_blocks(weight: Tensor, group: Group, filters: str, kernel_size: int) -> list[Tensor]:
    """`weight_blocks` of filters [O, I, G, P], for the I*Q maps that Q functions make of I fields."""
    turns = fourier_frames(group, kernel_size, filters).turns.to(weight)
    return weight_blocks(torch.einsum("kqp,oikp->oiqk", turns, weight).flatten(1, 2), group)


def multiply_adds(group: Group, in_channels: int, out_channels: int) -> int:
    """Products of `group_linear` at one position, those of the change of basis included."""
    units = sum(blocks.units for blocks in fourier_blocks(group))
    return units * in_channels * out_channels + group.order**2 * (in_channels + out_channels)


def _sign(group: Group, element: int, frequency: int, parity: int) -> int:
    """A representation of dimension 1: rotations by 1 or alternating, mirrors by the parity."""
    r, mirrored = group.split(element)
    return (-1 if frequency and r % 2 else 1) * (parity if mirrored else 1)


def _turn(group: Group, element: int, frequency: int) -> Tensor:
    """A representation of dimension 2: turns `frequency` times as fast, a mirror of the second axis."""
    r, mirrored = group.split(element)
    angle = 2 * math.pi * (frequency * r % group.rotations) / group.rotations
    cos, sin, sign = math.cos(angle), math.sin(angle), -1 if mirrored else 1
    return torch.tensor([[cos, -sin * sign], [sin, cos * sign]], dtype=torch.float64)


def _blocks(representations: Tensor, rows: int) -> Blocks:
    """Of representations [n, G, d, d]."""
    order, dim = representations.shape[1:3]
    basis = representations[:, :, :rows].permute(0, 2, 3, 1) * math.sqrt(dim / order)
    return Blocks(basis.contiguous(), representations.permute(0, 2, 3, 1).contiguous())
