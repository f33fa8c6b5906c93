r"""The MLP of a block in the Fourier basis of its group: two group-linear maps, batch norm, dropout and ReLU between them.

    hidden = W1 x,    out = W2 relu(keep * (scale * hidden + shift))

`scale` and `shift` are those of the batch norm of the hidden map, `keep` a number for each sample and field. The hidden map is
the largest of a block, and as separate layers norm, dropout and ReLU read and write all of it several times in each direction,
for hardly any arithmetic. Here they are done to a few samples at a time, while these are in the cache between the steps of the
two maps (`revit.nn.fourier`). A large hidden map is not kept: the backward pass computes it again, from the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revit.groups import Group
from revit.nn.fourier import Steps, add_up
from revit.nn.matrix_products import add_product
from revit.nn.normalization import gradient_of, loses_digits, variance_of

KEPT = 2**26
"""Bytes of a hidden map that are kept for the backward pass. Larger ones are computed again."""


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
        steps = Steps(x, first, group, None)
        hidden = x.new_empty(len(x), steps.out_fields, *x.shape[2:])

        def expand(parts: list[slice]) -> list[Tensor]:
            found, rooms = [x.new_zeros(steps.out_fields) for _ in range(2)], steps.rooms(x, parts, 2)
            for part in parts:
                steps.run_into(hidden[part], x[part], *rooms)
                rows = hidden[part].flatten(2)
                found[0] += rows.sum(2).sum(0)
                found[1] += torch.linalg.vector_norm(rows, dim=2).square().sum(0)
            return found

        count = hidden.numel() // hidden.shape[1]
        mean, mean_square = (total / count for total in add_up(steps.share(expand, x)))
        variance = variance_of(hidden, mean, mean_square)
        activation = _Activation(weight, bias, mean, variance, keep, eps)
        steps = Steps(hidden, second, group, None)
        out = x.new_empty(len(x), steps.out_fields, *x.shape[2:])

        def contract(parts: list[slice]) -> None:
            one, two, three = steps.rooms(hidden, parts, 3)
            for part in parts:
                steps.run_into(out[part], activation.of(hidden[part], part, three), one, two)

        steps.share(contract, hidden)
        kept = hidden if hidden.numel() * hidden.element_size() <= KEPT else hidden.new_empty(0)
        ctx.save_for_backward(x, kept, weight, bias, mean, variance, keep, *blocks)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, weight, bias, mean, variance, keep, *blocks = ctx.saved_tensors
        first, second = _halves(blocks)
        expanding = Steps(x, first, ctx.group, None)
        activation, grad = _Activation(weight, bias, mean, variance, keep, ctx.eps), grads[0]
        # That of what the norm gives, before the sums over the batch are known.
        of_hidden = x.new_empty(len(x), expanding.out_fields, *x.shape[2:])
        steps = Steps(of_hidden, second, ctx.group, None)

        def contract(parts: list[slice]) -> list[Tensor]:
            found, (*rooms, room, space) = [torch.zeros_like(block) for block in second], steps.rooms(x, parts, 5)
            of_bias, of_scale = x.new_zeros(expanding.out_fields), x.new_zeros(expanding.out_fields)
            for part in parts:
                of_active = of_hidden[part]
                if len(kept):
                    hidden = kept[part]
                else:
                    hidden = space[: of_active.numel()].view_as(of_active)
                    expanding.run_into(hidden, x[part], *rooms[:2])
                active = activation.of(hidden, part, room)
                steps.differentiate(grad[part], active, found, of_active, rooms)
                torch.ops.aten.threshold_backward.grad_input(of_active, active, 0, grad_input=of_active)
                of_bias += (of_active.flatten(2).sum(2) * keep[part]).sum(0)
                of_scale += (torch.mul(of_active, hidden, out=active).flatten(2).sum(2) * keep[part]).sum(0)
            return [*found, of_bias, of_scale]

        *of_second, of_bias, of_scale = add_up(steps.share(contract, of_hidden))
        deviation = (variance + ctx.eps).rsqrt()
        of_weight = (of_scale - mean * of_bias) * deviation
        share = of_hidden.shape[1] / of_hidden.numel()
        a, b, c = gradient_of(weight, mean, deviation, of_weight, of_bias, share)
        a, c = (a * keep)[..., None, None, None], c.view(-1, 1, 1, 1)
        # The gradient of the hidden map is `a of_hidden + b hidden + c`, and hidden is W1 x: its part in that of x is another
        # map of x, and its part in that of W1 a product of W1 with the scalar products of all fields of x.
        scaled = [b.repeat(dim).unsqueeze(1) * block for dim, block in zip(expanding.dims, first, strict=True)]
        through = [block.mT @ of_block for block, of_block in zip(first, scaled, strict=True)]
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None

        def expand(parts: list[slice]) -> list[Tensor]:
            found, products = ([torch.zeros_like(block) for block in blocks] for blocks in (first, through))
            one, two, three, room = expanding.rooms(x, parts, 4)
            for part in parts:
                of_part = room[: of_hidden[part].numel()].view_as(of_hidden[part])
                mixed = expanding.analyse_output(torch.mul(of_hidden[part], a[part], out=of_part).add_(c), one, two)
                seen = expanding.analyse(x[part], one, three)
                expanding.differentiate_mixing(mixed, seen, found)
                for product, fields in zip(products, expanding.split(seen, x.shape[1]), strict=True):
                    add_product(product, fields, fields.mT)
                if of_x is not None:
                    back = expanding.mix_transposed(mixed, one).add_(expanding.mix(seen, through, two))
                    expanding.analyse_transposed(back, x[part], three, of_x[part])
            return [*found, *products]

        found, products = _halves(add_up(expanding.share(expand, x)))
        of_first = [torch.baddbmm(*parts) for parts in zip(found, scaled, products, strict=True)]
        return of_x, of_weight, of_bias, None, None, None, *of_first, *of_second


class _Activation:
    """Norm, dropout and ReLU of some samples."""

    def __init__(self, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, keep: Tensor, eps: float) -> None:
        scale = weight * (variance + eps).rsqrt()
        self.mean = mean.view(-1, 1, 1, 1) if loses_digits(mean, variance) else None
        shift = bias if self.mean is not None else bias - mean * scale
        self.scale, self.shift = ((number * keep)[..., None, None, None] for number in (scale, shift))  # [B, C, 1, 1, 1]

    def of(self, x: Tensor, part: slice, room: Tensor) -> Tensor:
        """Of the hidden map of these samples, in the room."""
        out = room[: x.numel()].view_as(x)
        if self.mean is not None:
            x = torch.sub(x, self.mean, out=out)
        return torch.mul(x, self.scale[part], out=out).add_(self.shift[part]).clamp_min_(0)  # faster than `addcmul`


def _halves(blocks: tuple[Tensor, ...] | list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(blocks) // 2
    return list(blocks[:half]), list(blocks[half:])
