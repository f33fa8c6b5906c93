r"""`spatial` attention between two maps in the Fourier basis of the group, without leaving it.

The scores of positions x and y are scalar products over fields and elements, `sum_g <Q(x, g), K(y, g)>`, and what is summed
with these weights is the same for all elements. The basis is orthonormal, so it changes neither: queries, keys and values are
compared and summed as the coefficients that the first map leaves, and go as such into the second one. What is saved is one
change of basis back and one forth, and all copies of queries, keys and values to and from memory: a few samples at a time go
through all of it while they are in the cache (`revit.nn.fourier`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revit.groups import Group
from revit.nn.fourier import Sight, Steps, add_up


def attend_coefficients(
    x: Tensor, first: list[Tensor], second: list[Tensor], num_heads: int, group: Group, sight: Sight | None
) -> Tensor:
    """Queries, keys and values by the blocks `first` (I -> 3C fields), `spatial` attention over the whole map, and the blocks
    `second` (C -> O): x [B, I, G, H, W] -> [B, O, G, H, W]. `sight` is that of the first map, which keeps the size."""
    out: Tensor = _Attention.apply(x, num_heads, group, sight, *first, *second)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_heads: int, group: Group, sight: Sight | None, *blocks: Tensor) -> Tensor:
        shapes = _Shapes(x, blocks, num_heads, group, sight)
        batch, positions = len(x), x.shape[3] * x.shape[4]
        qkv = x.new_empty(3, batch, *shapes.tokens)  # coefficients [3, B, heads, G, D, P]
        weights = x.new_empty(batch, num_heads, positions, positions)
        summed = x.new_empty(batch, *shapes.tokens)
        out = x.new_empty(batch, shapes.second.out_fields, *x.shape[2:])

        def work(parts: list[slice]) -> None:
            one, two = shapes.first.rooms(x, parts, 2)
            for part in parts:
                mixed = shapes.first.mix(shapes.first.analyse(x[part], one, two), shapes.first.blocks, one)
                qkv[:, part].copy_(shapes.by_sample(mixed, 3))
                q, k, v = (each[part].flatten(0, 1).flatten(1, 2) for each in qkv)  # [B*heads, G*D, P]
                w, s = weights[part].flatten(0, 1), summed[part].flatten(0, 1).flatten(1, 2)
                torch.baddbmm(w, q.mT, k, beta=0, alpha=shapes.scale, out=w)
                torch.softmax(w, -1, out=w)
                torch.bmm(v, w.mT, out=s)
                mixed = shapes.second.mix(shapes.by_element(summed[part].unsqueeze(0), one), shapes.second.blocks, two)
                shapes.second.synthesise(mixed, out[part])

        shapes.first.share(work, x)
        ctx.save_for_backward(x, qkv, weights, summed, *blocks)
        ctx.options = num_heads, group, sight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, qkv, weights, summed, *blocks = ctx.saved_tensors
        shapes, (grad,) = _Shapes(x, blocks, *ctx.options), grads
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None

        def work(parts: list[slice]) -> list[Tensor]:
            of_first, of_second = (
                [torch.zeros_like(block) for block in steps.blocks] for steps in (shapes.first, shapes.second)
            )
            one, two, three = shapes.first.rooms(x, parts, 3)
            samples = parts[0].stop - parts[0].start
            of_tokens = torch.empty_like(qkv[:, :samples])
            of_sums, of_scores = torch.empty_like(summed[:samples]), torch.empty_like(weights[:samples]).flatten(0, 1)
            for part in parts:
                mixed = shapes.second.analyse_output(grad[part], one, two)
                shapes.second.differentiate_mixing(mixed, shapes.by_element(summed[part].unsqueeze(0), one), of_second)
                back = shapes.by_sample(shapes.second.mix_transposed(mixed, one), 1)[0]
                count = len(back)
                g = of_sums[:count].copy_(back).flatten(0, 1).flatten(1, 2)  # [B*heads, G*D, P]
                q, k, v = (each[part].flatten(0, 1).flatten(1, 2) for each in qkv)
                of_q, of_k, of_v = (each[:count].flatten(0, 1).flatten(1, 2) for each in of_tokens)
                w = weights[part].flatten(0, 1)
                s = of_scores[: len(w)]
                torch.bmm(g, w, out=of_v)
                torch.bmm(g.mT, v, out=s)
                torch.ops.aten._softmax_backward_data.out(s, w, -1, s.dtype, grad_input=s)
                torch.baddbmm(of_q, k, s.mT, beta=0, alpha=shapes.scale, out=of_q)
                torch.baddbmm(of_k, q, s, beta=0, alpha=shapes.scale, out=of_k)
                mixed = shapes.by_element(of_tokens[:, :count], two)
                shapes.first.differentiate_mixing(mixed, shapes.first.analyse(x[part], one, three), of_first)
                if of_x is not None:
                    shapes.first.analyse_transposed(shapes.first.mix_transposed(mixed, one), x[part], three, of_x[part])
            return [*of_first, *of_second]

        return of_x, None, None, None, *add_up(shapes.first.share(work, x))


class _Shapes:
    """The two maps, and how the coefficients between them lie: by element for the maps, by sample for attention."""

    def __init__(
        self, x: Tensor, blocks: tuple[Tensor, ...] | list[Tensor], num_heads: int, group: Group, sight: Sight | None
    ) -> None:
        half = len(blocks) // 2
        self.first = Steps(x, blocks[:half], group, sight)
        channels, positions = self.first.out_fields // 3, x.shape[3] * x.shape[4]
        self.second = Steps(x.new_empty(0, channels, *x.shape[2:]), blocks[half:], group, None)
        self.tokens = num_heads, group.order, channels // num_heads, positions
        self.scale = (channels // num_heads * group.order) ** -0.5

    def by_sample(self, coefficients: Tensor, kinds: int) -> Tensor:
        """[G, kinds*C*B*P] -> [kinds, B, heads, G, D, P]."""
        heads, order, dim, positions = self.tokens
        return coefficients.view(order, kinds, heads, dim, -1, positions).permute(1, 4, 2, 0, 3, 5)

    def by_element(self, tokens: Tensor, room: Tensor) -> Tensor:
        """The inverse, in the room."""
        x = tokens.permute(3, 0, 2, 4, 1, 5)  # [G, kinds, heads, D, B, P]
        return room[: x.numel()].view(x.shape).copy_(x).view(len(x), -1)
