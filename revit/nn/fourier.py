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

What is saved in products would be lost in memory traffic if a whole batch went through one step after the other. So some
samples at a time go through all steps, while they are in the cache; the backward pass computes their coefficients again from
the input, which is all that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from revit.actions import kernel_bank, turn_index, turn_table
from revit.exactness import Sampling
from revit.groups import Group
from revit.nn.threads import on_threads

CACHE = 2**21
"""Bytes of coefficients that go through all steps at a time, on each thread: from half of it to its double all are alike."""


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
    return transform(x, weight_blocks(weight, group), group)


def weight_blocks(weight: Tensor, group: Group) -> list[Tensor]:
    """What weights [O, I, G] are in the basis of the group: matrices [n*rows, d*O, d*I] for each dimension d."""
    found = []
    for part in fourier_blocks(group):
        blocks = torch.einsum("nbck,oik->nboci", part.spectrum.to(weight), weight).flatten(3).flatten(1, 2)  # [n, d*O, d*I]
        found.append(blocks.repeat_interleave(part.basis.shape[1], dim=0))
    return found


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
    return transform(x, filter_blocks(weight, group, filters, sampling.kernel_size), group, Sight(filters, sampling))


def filter_blocks(weight: Tensor, group: Group, filters: str, kernel_size: int) -> list[Tensor]:
    """`weight_blocks` of filters [O, I, G, P], for the I*Q maps that Q functions make of I fields."""
    turns = fourier_frames(group, kernel_size, filters).turns.to(weight)
    return weight_blocks(torch.einsum("kqp,oikp->oiqk", turns, weight).flatten(1, 2), group)


class Sight(NamedTuple):
    """How fields are seen before they are mixed: through the functions of these filters, at these positions."""

    filters: str
    sampling: Sampling


def transform(x: Tensor, blocks: Sequence[Tensor], group: Group, sight: Sight | None = None) -> Tensor:
    """Mixes fields by matrices in the basis of the group: x [B, I, G, H, W] -> [B, O, G, H', W']."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        x, blocks = x.to(lower), [block.to(lower) for block in blocks]
    with torch.autocast(device, enabled=False):
        if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
            return _Steps(x, blocks, group, sight).run(x).contiguous()
        filters, sampling = ("", Sampling(1)) if sight is None else sight
        out: Tensor = _in_parts(x, list(blocks), group.name, filters, list(astuple(sampling)))
        return out


class _Steps:
    """The linear steps of `transform` and their transposes, for some samples.

    With the group first and positions last, [G, I, B, H, W], every step but the convolution is one large matrix product.
    """

    def __init__(self, x: Tensor, blocks: Sequence[Tensor], group: Group, sight: Sight | None) -> None:
        parts = fourier_blocks(group)
        self.basis = torch.cat([part.basis.flatten(0, 2) for part in parts]).to(x)  # [G, G]
        self.counts, self.dims = [part.basis.shape[:3].numel() for part in parts], [part.basis.shape[2] for part in parts]
        self.blocks, self.order, self.fields, self.size = blocks, group.order, x.shape[1], (x.shape[3], x.shape[4])
        self.out_fields, self.functions = blocks[0].shape[1], 1
        self.sampling, self.bank = None if sight is None else sight.sampling, x
        if sight is not None:
            functions = fourier_frames(group, sight.sampling.kernel_size, sight.filters).functions
            self.functions, self.bank = functions.shape[1], functions.to(x).flatten(0, 1).unsqueeze(1)  # [G*Q, 1, K, K]
            self.format = torch.channels_last if x.is_cpu else torch.contiguous_format  # twice as fast, the copies included
            self.size = sight.sampling.output_size(x.shape[3]), sight.sampling.output_size(x.shape[4])

    def run(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.analyse(x), self.blocks)
        out = torch.mm(self.basis.T, mixed).view(self.order, self.out_fields, len(x), *self.size)
        return out.permute(2, 1, 0, 3, 4)  # [B, O, G, H', W']

    def analyse(self, x: Tensor) -> Tensor:
        """The coefficients of what is seen of x: [G, I*Q*B*P]."""
        seen = x.unsqueeze(3)  # [B, I, G, Q, H', W']
        if self.sampling is not None:
            inputs = x.flatten(0, 1).contiguous(memory_format=self.format)
            maps = F.conv2d(inputs, self.bank, None, *self._sampling(), groups=self.order)
            seen = maps.unflatten(1, (self.order, self.functions)).unflatten(0, (len(x), self.fields))
        return torch.mm(self.basis, seen.permute(2, 1, 3, 0, 4, 5).reshape(self.order, -1))

    def analyse_transposed(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, given that of its coefficients."""
        grad = torch.mm(self.basis.T, grad).view(self.order, self.fields, self.functions, len(x), *self.size)
        grad = grad.permute(3, 1, 0, 2, 4, 5)  # [B, I, G, Q, H', W']
        if self.sampling is None:
            return grad.squeeze(3)
        sampling = [[value, value] for value in self._sampling()]
        maps = grad.reshape(len(x) * self.fields, -1, *self.size)
        found = torch.ops.aten.convolution_backward(
            maps, x.flatten(0, 1), self.bank, None, *sampling, False, [0, 0], self.order, [True, False, False]
        )
        return found[0].view_as(x)

    def _sampling(self) -> tuple[int, int, int]:
        assert self.sampling is not None
        return self.sampling.stride, self.sampling.padding, self.sampling.dilation

    def mix(self, coefficients: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """[G, I*Q*B*P] -> [G, O*B*P], or back with transposed blocks."""
        matrices = zip(blocks, self.split(coefficients, blocks[0].shape[2]), strict=True)
        mixed = [torch.bmm(block, part).view(count, -1) for count, (block, part) in zip(self.counts, matrices, strict=True)]
        return torch.cat(mixed)

    def split(self, coefficients: Tensor, fields: int) -> list[Tensor]:
        """[G, fields*B*P] -> the matrices [n*rows, d*fields, B*P] that meet the blocks."""
        parts = zip(coefficients.split(self.counts), self.dims, strict=True)
        return [part.view(len(part) // dim, dim * fields, -1) for part, dim in parts]

    def parts(self, x: Tensor) -> list[slice]:
        """Samples to take at a time. Elsewhere than on a CPU all of them: there are no caches to fit into."""
        entries = self.order * self.size[0] * self.size[1] * max(self.fields * self.functions, self.out_fields)
        some = max(1, CACHE // max(1, entries * x.element_size())) if x.is_cpu else max(1, len(x))
        return [slice(start, start + some) for start in range(0, len(x), some)]


@torch.library.custom_op("revit::fourier_transform", mutates_args=())
def _in_parts(x: Tensor, blocks: list[Tensor], group: str, filters: str, sampling: list[int]) -> Tensor:
    """`_Steps.run`, some samples at a time on each thread: one operation, so that what counts operations sees all threads."""
    steps = _Steps(x, blocks, Group.parse(group), _sight(filters, sampling))
    out = x.new_empty(len(x), steps.out_fields, steps.order, *steps.size)

    def work(parts: list[slice]) -> None:
        for part in parts:
            out[part] = steps.run(x[part])

    on_threads(work, steps.parts(x))
    return out


@_in_parts.register_fake
def _(x: Tensor, blocks: list[Tensor], group: str, filters: str, sampling: list[int]) -> Tensor:
    height, width = x.shape[-2:]
    if (sight := _sight(filters, sampling)) is not None:
        height, width = sight.sampling.output_size(height), sight.sampling.output_size(width)
    return x.new_empty(len(x), blocks[0].shape[1], x.shape[2], height, width)


@torch.library.custom_op("revit::fourier_transform_backward", mutates_args=())
def _in_parts_backward(
    grad: Tensor, x: Tensor, blocks: list[Tensor], group: str, filters: str, sampling: list[int], of_x: bool
) -> list[Tensor]:
    """The gradient of x, if it is wanted, and those of the blocks."""
    steps = _Steps(x, blocks, Group.parse(group), _sight(filters, sampling))
    transposed = [block.mT for block in blocks]
    grad_x = torch.empty_like(x) if of_x else None

    def work(parts: list[slice]) -> list[Tensor]:
        grad_blocks = [torch.zeros_like(block) for block in blocks]
        for part in parts:
            mixed = torch.mm(steps.basis, grad[part].permute(2, 1, 0, 3, 4).reshape(steps.order, -1))
            seen = steps.split(steps.analyse(x[part]), steps.fields * steps.functions)
            for found, a, b in zip(grad_blocks, steps.split(mixed, steps.out_fields), seen, strict=True):
                found.baddbmm_(a, b.mT)
            if grad_x is not None:
                grad_x[part] = steps.analyse_transposed(steps.mix(mixed, transposed), x[part])
        return grad_blocks

    some, *others = on_threads(work, steps.parts(x))
    for found in others:
        torch._foreach_add_(some, found)
    return some if grad_x is None else [grad_x, *some]


@_in_parts_backward.register_fake
def _(grad: Tensor, x: Tensor, blocks: list[Tensor], group: str, filters: str, sampling: list[int], of_x: bool) -> list[Tensor]:
    return [torch.empty_like(like) for like in ([x, *blocks] if of_x else blocks)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, blocks, *ctx.options = inputs
    ctx.save_for_backward(x, *blocks)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *blocks = ctx.saved_tensors
    of_x = ctx.needs_input_grad[0]
    found = _in_parts_backward(grad, x, blocks, *ctx.options, of_x)
    grad_x, grad_blocks = (found[0], found[1:]) if of_x else (None, found)
    return grad_x, grad_blocks, None, None, None


_in_parts.register_autograd(_differentiate, setup_context=_remember)


def _sight(filters: str, sampling: list[int]) -> Sight | None:
    return Sight(filters, Sampling(*sampling)) if filters else None


@register_flop_formula(torch.ops.revit.fourier_transform)
def _flops(
    x: Any, blocks: Any, group: str, filters: str, sampling: list[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Two for each product, from the shapes."""
    batch, fields, order = x[:3]
    functions = blocks[0][2] // fields
    seen = fields * functions * order * sampling[0] ** 2 if filters else 0
    positions = batch * out_shape[-2] * out_shape[-1]
    return 2 * positions * (seen + multiply_adds(Group.parse(group), fields * functions, blocks[0][1]))


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
