r"""Group-linear maps and group convolutions in the real Fourier basis of the group (`revit.nn.fourier_basis` derives it).

What is saved in products would be lost in memory traffic if a whole batch went through one step after the other. So some
samples at a time go through all steps, while they are in the cache; the backward pass computes their coefficients again from
the input, which is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from revit.exactness import Sampling
from revit.groups import Group
from revit.nn.fourier_basis import fourier_blocks, fourier_frames, multiply_adds, weight_blocks
from revit.nn.matrix_products import add_product, multiply
from revit.nn.threads import on_threads

CACHE = 2**22
"""Bytes of coefficients that go through all steps at a time: from half of it to its double all are alike."""

T = TypeVar("T")


def group_linear(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """`out[o](g) = sum over i and h of weight[o, i](g^-1 h) x[i](h)` at every position.

    x [B, I, G, H, W] and weight [O, I, G] -> [B, O, G, H, W]
    """
    return transform(x, weight_blocks(weight, group), group)


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
            return Steps(x, blocks, group, sight).run(x).contiguous()
        filters, sampling = ("", Sampling(1)) if sight is None else sight
        out: Tensor = _in_parts(x, list(blocks), group.name, filters, list(astuple(sampling)))
        return out


class Steps:
    """The linear steps of `transform` and their transposes, for some samples.

    With the group first and positions last, [G, I, B, H, W], every step but the convolution is one large matrix product. Steps
    write into `rooms`, memory of the caller's that stays in the cache; without rooms each step returns new memory.
    """

    def __init__(self, x: Tensor, blocks: Sequence[Tensor], group: Group, sight: Sight | None) -> None:
        parts = fourier_blocks(group)
        self.basis = torch.cat([part.basis.flatten(0, 2) for part in parts]).to(x)  # [G, G]
        self.counts, self.dims = [part.basis.shape[:3].numel() for part in parts], [part.basis.shape[2] for part in parts]
        self.blocks, self.order, self.fields, self.size = blocks, group.order, x.shape[1], (x.shape[3], x.shape[4])
        self.out_fields, self.functions = blocks[0].shape[1], 1
        self.sampling, self.bank = None if sight is None else sight.sampling, x
        self.transposed = [block.mT for block in blocks]
        self.known: dict[tuple[int, int, int], list[Tensor]] = {}
        if sight is not None:
            functions = fourier_frames(group, sight.sampling.kernel_size, sight.filters).functions
            self.functions, self.bank = functions.shape[1], functions.to(x).flatten(0, 1).unsqueeze(1)  # [G*Q, 1, K, K]
            self.format = torch.channels_last if x.is_cpu else torch.contiguous_format  # twice as fast, the copies included
            self.size = sight.sampling.output_size(x.shape[3]), sight.sampling.output_size(x.shape[4])

    def run(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.analyse(x), self.blocks)
        out = self._product(self.basis.T, mixed, None).view(self.order, self.out_fields, len(x), *self.size)
        return out.permute(2, 1, 0, 3, 4)  # [B, O, G, H', W']

    def run_into(self, out: Tensor, x: Tensor, one: Tensor, other: Tensor) -> None:
        """The same into a part of the result."""
        self.synthesise(self.mix(self.analyse(x, one, other), self.blocks, one), out)

    def synthesise(self, coefficients: Tensor, out: Tensor) -> None:
        """Maps [B, fields, G, H', W'] of these coefficients [G, fields*B*P], sample by sample: none is moved afterwards."""
        samples, fields = out.shape[:2]
        parts = coefficients.view(self.order, fields, samples, -1).permute(2, 1, 0, 3).unbind()  # [fields, G, P]
        basis = self.basis.T.expand(fields, -1, -1)
        for part, maps in zip(parts, out.flatten(3).unbind(), strict=True):
            torch.bmm(basis, part, out=maps)

    def analyse(self, x: Tensor, one: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """The coefficients of what is seen of x: [G, I*Q*B*P], in the other room."""
        seen = x.unsqueeze(3)  # [B, I, G, Q, H', W']
        if self.sampling is not None:
            inputs = x.flatten(0, 1).contiguous(memory_format=self.format)
            maps = F.conv2d(inputs, self.bank, None, *self._sampling(), groups=self.order)
            seen = maps.unflatten(1, (self.order, self.functions)).unflatten(0, (len(x), self.fields))
        return self._product(self.basis, self._group_first(seen.permute(2, 1, 3, 0, 4, 5), one), other)

    def analyse_output(self, grad: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """The coefficients of the gradient of what comes out: [G, O*B*P], in the other room."""
        return self._product(self.basis, self._group_first(grad.permute(2, 1, 0, 3, 4), one), other)

    def analyse_transposed(self, grad: Tensor, x: Tensor, room: Tensor, out: Tensor) -> None:
        """The gradient of x, given that of its coefficients, into a part of the result."""
        if self.sampling is None:
            self.synthesise(grad, out)
            return
        grad = self._product(self.basis.T, grad, room)
        grad = grad.view(self.order, self.fields, self.functions, len(x), *self.size)
        grad = grad.permute(3, 1, 0, 2, 4, 5)  # [B, I, G, Q, H', W']
        sampling = [[value, value] for value in self._sampling()]
        maps = grad.reshape(len(x) * self.fields, -1, *self.size)
        found = torch.ops.aten.convolution_backward(
            maps, x.flatten(0, 1), self.bank, None, *sampling, False, [0, 0], self.order, [True, False, False]
        )
        out.copy_(found[0].view_as(x))

    def differentiate(
        self, grad: Tensor, x: Tensor, grad_blocks: list[Tensor], grad_x: Tensor | None, rooms: Sequence[Tensor]
    ) -> None:
        """Adds the gradients of the blocks to `grad_blocks`, given that of what comes out, and writes that of x, if wanted."""
        one, two, three = rooms
        mixed = self.analyse_output(grad, one, two)
        self.differentiate_mixing(mixed, self.analyse(x, one, three), grad_blocks)
        if grad_x is not None:
            self.analyse_transposed(self.mix_transposed(mixed, one), x, three, grad_x)

    def differentiate_mixing(self, grad: Tensor, coefficients: Tensor, grad_blocks: list[Tensor]) -> None:
        """Adds the gradients of the blocks, given that of what `mix` gives and what it was given."""
        parts = self.split(grad, self.out_fields), self.split(coefficients, self.fields * self.functions)
        for found, a, b in zip(grad_blocks, *parts, strict=True):
            add_product(found, a, b.mT)

    def mix_transposed(self, grad: Tensor, room: Tensor) -> Tensor:
        """The gradient of what `mix` was given, given that of what it gives."""
        return self.mix(grad, self.transposed, room)

    def _sampling(self) -> tuple[int, int, int]:
        assert self.sampling is not None
        return self.sampling.stride, self.sampling.padding, self.sampling.dilation

    def _group_first(self, x: Tensor, room: Tensor | None) -> Tensor:
        """[G, ...] of any layout as a matrix [G, ...]."""
        if room is None:
            return x.reshape(self.order, -1)
        return room[: x.numel()].view(x.shape).copy_(x).view(self.order, -1)

    def _product(self, a: Tensor, b: Tensor, room: Tensor | None) -> Tensor:
        return torch.mm(a, b, out=None if room is None else room[: b.numel()].view_as(b))

    def mix(self, coefficients: Tensor, blocks: Sequence[Tensor], room: Tensor | None = None) -> Tensor:
        """[G, I*Q*B*P] -> [G, O*B*P], or back with transposed blocks."""
        split = self._split if room is None else self.split
        pairs = list(zip(blocks, split(coefficients, blocks[0].shape[2]), strict=True))
        if room is None:
            return torch.cat([torch.bmm(*pair).view(count, -1) for count, pair in zip(self.counts, pairs, strict=True)])
        columns = coefficients.shape[1] // blocks[0].shape[2] * blocks[0].shape[1]
        mixed = room[: self.order * columns].view(self.order, columns)
        for pair, part in zip(pairs, self.split(mixed, blocks[0].shape[1]), strict=True):
            multiply(*pair, out=part)
        return mixed

    def split(self, coefficients: Tensor, fields: int) -> list[Tensor]:
        """Coefficients in a room, [G, fields*B*P] -> the matrices [n*rows, d*fields, B*P] that meet the blocks.

        They stand in the same few rooms part after part, and threads wait for each other at every call from Python: so what
        was split once is not split again.
        """
        key = coefficients.data_ptr(), coefficients.shape[1], fields
        if key not in self.known:
            self.known[key] = self._split(coefficients, fields)
        return self.known[key]

    def _split(self, coefficients: Tensor, fields: int) -> list[Tensor]:
        parts = zip(coefficients.split(self.counts), self.dims, strict=True)
        return [part.view(len(part) // dim, dim * fields, -1) for part, dim in parts]

    def share(self, work: Callable[[list[slice]], T], x: Tensor) -> list[T]:
        """What `work` gives for as many samples at a time as fit the cache. Large ones and many go to threads that each compute
        alone: cores that work on a part together read what the other one wrote, which takes far longer if they have no cache
        in common. On few small ones all threads work together, for new threads would wait for those of torch, which go on
        spinning for milliseconds. Elsewhere than on a CPU all at once: there are no caches to fit into."""
        size = max(1, self._entries() * x.element_size())
        large = x.is_cpu and (4 * size > CACHE or size * len(x) >= 4 * CACHE)
        some = max(1, CACHE // (2 * size if large else size)) if x.is_cpu else max(1, len(x))
        count = -(-len(x) // some)
        if large:  # as many for each thread
            threads = torch.get_num_threads()
            count = min(len(x), -(-count // threads) * threads)
        parts = even_parts(len(x), count)
        return on_threads(work, parts) if large else [work(parts)]

    def rooms(self, x: Tensor, parts: list[slice], count: int) -> Tensor:
        """Memory for `count` steps of any part: [count, numbers]."""
        samples = parts[0].stop - parts[0].start if parts else 0
        return x.new_empty(count, samples * self._entries())

    def _entries(self) -> int:
        """The most numbers that a step makes of a sample."""
        return self.order * self.size[0] * self.size[1] * max(self.fields * self.functions, self.out_fields)


def even_parts(length: int, count: int) -> list[slice]:
    """So many parts of a batch, the first ones by one sample larger if they cannot be alike."""
    size, larger = divmod(length, max(1, count))
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def add_up(found: list[list[Tensor]]) -> list[Tensor]:
    """The sums of what threads have found."""
    some, *others = found
    for more in others:
        torch._foreach_add_(some, more)
    return some


@torch.library.custom_op("revit::fourier_transform", mutates_args=())
def _in_parts(x: Tensor, blocks: list[Tensor], group: str, filters: str, sampling: list[int]) -> Tensor:
    """`Steps.run`, some samples at a time, as one operation."""
    steps = Steps(x, blocks, Group.parse(group), _sight(filters, sampling))
    out = x.new_empty(len(x), steps.out_fields, steps.order, *steps.size)

    def work(parts: list[slice]) -> None:
        rooms = steps.rooms(x, parts, 2)
        for part in parts:
            steps.run_into(out[part], x[part], *rooms)

    steps.share(work, x)
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
    steps = Steps(x, blocks, Group.parse(group), _sight(filters, sampling))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None

    def work(parts: list[slice]) -> list[Tensor]:
        grad_blocks, (*rooms,) = [torch.zeros_like(block) for block in blocks], steps.rooms(x, parts, 3)
        for part in parts:
            steps.differentiate(grad[part], x[part], grad_blocks, None if grad_x is None else grad_x[part], rooms)
        return grad_blocks

    grad_blocks = add_up(steps.share(work, x))
    return grad_blocks if grad_x is None else [grad_x, *grad_blocks]


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
