r"""The MLP of a block in the Fourier basis of its group: two group-linear maps, batch norm, dropout and ReLU between them.

    hidden = W1 x,    out = W2 relu(keep * (scale * hidden + shift))

`scale` and `shift` are those of the batch norm of the hidden map, `keep` a number for each sample and field. The hidden map is
the largest of a block, and as separate layers norm, dropout and ReLU read and write all of it several times in each direction,
for hardly any arithmetic. Here they are done to a few samples at a time, while these are in the cache between the steps of the
two maps (`revit.nn.fourier`). The hidden map is not kept: the backward pass computes it again, from the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revit.groups import Group
from revit.nn.fourier import Steps, add_up
from revit.nn.normalization import gradient_of, loses_digits, variance_of


def mlp(
    x: Tensor, first: list[Tensor], second: list[Tensor], weight: Tensor, bias: Tensor, keep: Tensor, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, I, G, H, W] -> the same shape of O fields, and mean and variance [C] of the hidden map, for the norm to remember.

    `first` and `second` are the blocks of the maps I -> C and C -> O, `weight` and `bias` [C] those of the norm, `keep` [B, C].
    """
    out: tuple[Tensor, Tensor, Tensor] = _MLP.apply(x, weight, bias, keep, eps, group, *first, *second)
    return out


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, keep: Tensor, eps: float, group: Group, *blocks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, second = _halves(blocks)
        hidden, sums = _expand(x, first, group, sums=True)
        count = hidden.numel() // hidden.shape[1]
        mean, mean_square = (total / count for total in sums)
        variance = variance_of(hidden, mean, mean_square)
        activation = _Activation(weight, bias, mean, variance, keep, eps)
        steps = Steps(hidden, second, group, None)
        out = x.new_empty(len(x), steps.out_fields, *x.shape[2:])

        def contract(parts: list[slice]) -> None:
            one, two, three = steps.rooms(hidden, parts, 3)
            for part in parts:
                steps.run_into(out[part], activation.of(hidden, part, three), one, two)

        steps.share(contract, hidden)
        ctx.save_for_backward(x, weight, bias, mean, variance, keep, *blocks)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, keep, *blocks = ctx.saved_tensors
        first, second = _halves(blocks)
        hidden, _ = _expand(x, first, ctx.group, sums=False)
        activation, grad = _Activation(weight, bias, mean, variance, keep, ctx.eps), grads[0]
        of_hidden = torch.empty_like(hidden)  # that of what the norm gives, before the sums over the batch are known
        steps = Steps(hidden, second, ctx.group, None)

        def contract(parts: list[slice]) -> list[Tensor]:
            found, (*rooms, room) = [torch.zeros_like(block) for block in second], steps.rooms(hidden, parts, 4)
            of_bias, of_scale = x.new_zeros(hidden.shape[1]), x.new_zeros(hidden.shape[1])
            for part in parts:
                active, of_active = activation.of(hidden, part, room), of_hidden[part]
                steps.differentiate(grad[part], active, found, of_active, rooms)
                torch.ops.aten.threshold_backward.grad_input(of_active, active, 0, grad_input=of_active)
                kept = keep[part]
                of_bias += (of_active.flatten(2).sum(2) * kept).sum(0)
                of_scale += (torch.mul(of_active, hidden[part], out=active).flatten(2).sum(2) * kept).sum(0)
            return [*found, of_bias, of_scale]

        *of_second, of_bias, of_scale = add_up(steps.share(contract, hidden))
        deviation = (variance + ctx.eps).rsqrt()
        of_weight = (of_scale - mean * of_bias) * deviation
        share = hidden.shape[1] / hidden.numel()
        a, b, c = gradient_of(weight, mean, deviation, of_weight, of_bias, share)
        a, b, c = (a * keep)[..., None, None, None], b.view(-1, 1, 1, 1), c.view(-1, 1, 1, 1)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        steps = Steps(x, first, ctx.group, None)

        def differentiate(parts: list[slice]) -> list[Tensor]:
            found, (*rooms, room) = [torch.zeros_like(block) for block in first], steps.rooms(x, parts, 4)
            for part in parts:
                maps = hidden[part]
                before = torch.addcmul(c, maps, b, out=room[: maps.numel()].view_as(maps)).addcmul_(of_hidden[part], a[part])
                steps.differentiate(before, x[part], found, None if of_x is None else of_x[part], rooms)
            return found

        of_first = add_up(steps.share(differentiate, x))
        return of_x, of_weight, of_bias, None, None, None, *of_first, *of_second


def _expand(x: Tensor, first: list[Tensor], group: Group, *, sums: bool) -> tuple[Tensor, list[Tensor]]:
    """The hidden map, and the sums of its numbers and of their squares for each field, if they are asked for."""
    steps = Steps(x, first, group, None)
    hidden = x.new_empty(len(x), steps.out_fields, *x.shape[2:])

    def work(parts: list[slice]) -> list[Tensor]:
        found, rooms = [x.new_zeros(steps.out_fields) for _ in range(2)], steps.rooms(x, parts, 2)
        for part in parts:
            steps.run_into(hidden[part], x[part], *rooms)
            if sums:
                rows = hidden[part].flatten(2)
                found[0] += rows.sum(2).sum(0)
                found[1] += torch.linalg.vector_norm(rows, dim=2).square().sum(0)
        return found

    return hidden, add_up(steps.share(work, x))


class _Activation:
    """Norm, dropout and ReLU of some samples."""

    def __init__(self, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, keep: Tensor, eps: float) -> None:
        scale = weight * (variance + eps).rsqrt()
        self.mean = mean.view(-1, 1, 1, 1) if loses_digits(mean, variance) else None
        shift = bias if self.mean is not None else bias - mean * scale
        self.scale, self.shift = ((number * keep)[..., None, None, None] for number in (scale, shift))  # [B, C, 1, 1, 1]

    def of(self, hidden: Tensor, part: slice, room: Tensor) -> Tensor:
        """Of these samples of the hidden map, in the room."""
        x = hidden[part]
        out = room[: x.numel()].view_as(x)
        if self.mean is not None:
            x = torch.sub(x, self.mean, out=out)
        return torch.addcmul(self.shift[part], x, self.scale[part], out=out).clamp_min_(0)


def _halves(blocks: tuple[Tensor, ...] | list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(blocks) // 2
    return list(blocks[:half]), list(blocks[half:])
