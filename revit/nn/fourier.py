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
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from revit.actions import kernel_bank, turn_index, turn_table
from revit.exactness import Sampling
from revit.groups import Group


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


@lru_cache
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


def group_linear(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """`out[o](g) = sum over i and h of weight[o, i](g^-1 h) x[i](h)` at every position.

    x [B, I, G, H, W] and weight [O, I, G] -> [B, O, G, H, W]
    """
    return _mix(x.permute(2, 1, 0, 3, 4), weight, group)


def _mix(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """`group_linear` of x [G, I, B, H, W]: with the group first and positions last, every step is one large matrix product."""
    order, fields = x.shape[:2]
    flat = x.reshape(order, -1)  # [G, I*B*P]
    out: Tensor | None = None
    for part in fourier_blocks(group):
        basis, spectrum = part.basis.to(x), part.spectrum.to(x)
        count, rows, dim, _ = basis.shape
        basis = basis.view(-1, order)  # [n*rows*d, G]
        blocks = torch.einsum("nbck,oik->nboci", spectrum, weight).flatten(3).flatten(1, 2)  # [n, d*O, d*I]
        blocks = blocks.repeat_interleave(rows, dim=0)
        entries = torch.mm(basis, flat).view(count * rows, dim * fields, -1)  # [n*rows, d*I, B*P]
        mixed = torch.bmm(blocks, entries).view(count * rows * dim, -1)  # [n*rows*d, O*B*P]
        out = torch.mm(basis.T, mixed) if out is None else torch.addmm(out, basis.T, mixed)
    assert out is not None  # every group has blocks of dimension 1
    return out.view(order, len(weight), *x.shape[2:]).permute(2, 1, 0, 3, 4).contiguous()


class Frames(NamedTuple):
    """The functions of filters as each element sees them, and how they turn into each other (float64)."""

    functions: Tensor
    """[G, Q, K, K]: `T_h b_q`."""
    turns: Tensor
    """[G, Q, P]: `D(k^-1)`, for each k."""


@lru_cache
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


def group_conv(x: Tensor, weight: Tensor, group: Group, filters: str, sampling: Sampling) -> Tensor:
    """The group convolution with filters `weight` [O, I, G, P]: [B, I, G, H, W] -> [B, O, G, H', W']."""
    functions, turns = (part.to(x) for part in fourier_frames(group, sampling.kernel_size, filters))
    fields, order = x.shape[1:3]
    bank = functions.flatten(0, 1).unsqueeze(1)  # [G*Q, 1, K, K]
    seen = F.conv2d(x.flatten(0, 1), bank, None, sampling.stride, sampling.padding, sampling.dilation, groups=order)
    seen = seen.unflatten(1, (order, -1)).unflatten(0, (-1, fields)).permute(2, 1, 3, 0, 4, 5).flatten(1, 2)
    return _mix(seen, torch.einsum("kqp,oikp->oiqk", turns, weight).flatten(1, 2), group)  # of [G, I*Q, B, H', W']


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
