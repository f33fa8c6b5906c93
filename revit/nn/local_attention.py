r"""Local attention with relative positions, as a loop over the offsets of a neighbourhood: `attend_relative` for K x K pixels.

Written as matrix products, local attention is millions of products of 4 x 4 or 8 x 8 matrices, one for each pixel and offset,
and unfolds keys and values K^2 times. Here the pixels are the innermost axis instead, row after row and stream after stream, so
the neighbours at an offset (i, j) are the same tensor from entry `i * W + j` on: nothing is unfolded, and every step is one
multiply-add of long vectors that stay in the cache. Neighbours that are not there are computed too, and get no weight.

The backward pass is written out: it computes the weights again, some streams at a time, and keeps nothing but the inputs.

Letters: S streams, G elements of a query or key, V elements of the output, D entries of a key, O offsets, L pixels of all
streams that are taken at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 2**18 + 2**17
"""Entries of one tensor of a step, which makes a step small enough for the cache and large enough to be worth a call."""
LEAST = -80.0
"""Position scores this far below the largest of their query count as this far: their sum never vanishes in float32."""


def attend_local(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int, scale: float
) -> Tensor:
    """Attention of maps to the size x size pixels around each pixel: q, k, v [B, heads, D, G, H, W] -> [B, heads, D, V, H, W].

    `encodings` [U, D] are those of the distinct turned offsets and `encoding_of` [size * size, V] says which one an offset has
    at an output element; `elements` [G, G, D] are those of a key's element seen from a query's. Scores are multiplied by
    `scale`.
    """
    out: Tensor = _forward(q, k, v, encodings, elements, encoding_of, size, scale)
    return out


def multiply_adds(pixels: int, order: int, outputs: int, dim: int, offsets: int, encodings: int) -> int:
    """Products of `attend_local` for one stream: scores, the two factors of the weights, and weights with values."""
    scores = order * order * dim * (offsets + 1) + order * dim * encodings
    return pixels * (scores + offsets * (outputs * order + outputs * order**2 + outputs * order * dim))


@torch.library.custom_op("revit::local_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int, scale: float
) -> Tensor:
    out = q.new_empty(_output_shape(q, encoding_of))
    for part, streams in _parts(Streams, q, encoding_of, size):
        streams.load(q[part], k[part], v[part], scale)
        streams.weigh(encodings, elements)
        out[part] = streams.images(streams.mean())
    return out


def _output_shape(q: Tensor, encoding_of: Tensor) -> tuple[int, ...]:
    return *q.shape[:3], encoding_of.shape[1], *q.shape[4:]


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int, scale: float
) -> Tensor:
    return q.new_empty(_output_shape(q, encoding_of))


@torch.library.custom_op("revit::local_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_encodings, grad_elements = torch.zeros_like(encodings), torch.zeros_like(elements)
    middle = len(encoding_of) // 2
    for part, streams in _parts(StreamsBackward, q, encoding_of, size):
        streams.load(q[part], k[part], v[part], scale)
        streams.weigh(encodings, elements)
        streams.differentiate(grad[part], encodings, elements, grad_encodings, grad_elements)
        torch.mul(streams.images(streams.grad_queries), scale, out=grad_q[part])
        grad_k[part], grad_v[part] = map(streams.images, (streams.grad_near_keys[middle], streams.grad_near_values[middle]))
    return grad_q, grad_k, grad_v, grad_encodings, grad_elements


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, encodings, elements = (x.new_empty(x.shape) for x in (q, k, v, encodings, elements))
    return q, k, v, encodings, elements


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


@register_flop_formula(torch.ops.revit.local_attention)
def _flops(q: Any, k: Any, v: Any, encodings: Any, elements: Any, encoding_of: Any, *_: Any, **__: Any) -> int:
    """Two for each product, from the shapes."""
    batch, heads, dim, order, height, width = q
    offsets, outputs = encoding_of
    return 2 * batch * heads * multiply_adds(height * width, order, outputs, dim, offsets, encodings[0])


Products = list[tuple[Tensor, Tensor]]
"""Pairs of tensors that broadcast, to be multiplied and summed."""


class Streams:
    """Memory for some streams, and each view of it that a step needs.

    Both are made once and used for all streams, some at a time: memory that is new to a process, and thousands of small views,
    would cost as much as the arithmetic. The attention weights are kept in two factors, `weights[o, v, g] * shares[o, g, h]`
    for offset o, output v, query g and key h.
    """

    def __init__(self, q: Tensor, encoding_of: Tensor, size: int) -> None:
        streams, dim, order, height, width = q.shape
        offsets, outputs = encoding_of.shape
        self.shape, self.size, self.encoding_of = (streams, height, width), size, encoding_of
        self.length, self.margin = streams * height * width, size // 2 * (width + 1)
        new = q.new_empty
        self.queries = new(dim, order, self.length)
        self.keys, self.values = q.new_zeros(2, dim, order, self.margin + self.length + self.margin)
        self.near_keys, self.near_values = self.near(self.keys), self.near(self.values)
        self.outside = self._outside(q.device).unsqueeze(1)  # [O, 1, L]
        self.shares = new(offsets, order, order, self.length)
        """`exp(score)` without the positions, divided by the largest over h."""
        self.totals, self.tops = new(2, offsets, order, self.length)
        """The sums of shares over h; the largest scores."""
        self.weights = new(offsets, outputs, order, self.length)
        """The rest, so that the products of both add up to 1 over offsets and h."""
        self.both, self.out = new(outputs, order, self.length), new(dim, outputs, self.length)

        entries = self.queries.unsqueeze(2).unbind(0)  # [g, 1, L] each
        self.scores = [_pairs(entries, key.unbind(0)) for key in self.near_keys]
        weights, shares = self.weights.unsqueeze(3), self.shares
        self.boths = [_pairs(w.unbind(1), s.unbind(0)) for w, s in zip(weights, shares, strict=True)]
        by_key = self.both.unbind(1)  # [V, L] each
        self.means = [_pairs(by_key, value.unsqueeze(2).unbind(1)) for value in self.near_values]

    def near(self, keys: Tensor) -> list[Tensor]:
        """The neighbour of every pixel at each offset, row by row from the top left: views [..., L] into keys."""
        steps = range(-(self.size // 2), self.size // 2 + 1)
        starts = [self.margin + down * self.shape[2] + right for down in steps for right in steps]
        return [keys[..., start : start + self.length] for start in starts]

    def _outside(self, device: torch.device) -> Tensor:
        """Where there is no such neighbour, [O, L]: beyond a row is a pixel of the next one, beyond an image another image."""
        streams, height, width = self.shape
        steps = torch.arange(-(self.size // 2), self.size // 2 + 1, device=device)[:, None]
        rows, columns = steps + torch.arange(height, device=device), steps + torch.arange(width, device=device)
        near_rows, near_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)  # [size, H], [size, W]
        inside = near_rows[:, None, :, None] & near_columns[None, :, None, :]
        return ~inside.flatten(2).flatten(0, 1).repeat(1, streams)

    def images(self, x: Tensor) -> Tensor:
        """[A, B, L] -> [n, A, B, H, W]"""
        return x.unflatten(-1, self.shape).movedim(2, 0)

    def load(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        torch.mul(q, scale, out=self.images(self.queries))
        middle = len(self.near_keys) // 2
        self.images(self.near_keys[middle]).copy_(k)
        self.images(self.near_values[middle]).copy_(v)

    def weigh(self, encodings: Tensor, elements: Tensor) -> None:
        """Fills `shares`, `totals` and `weights`."""
        start = torch.matmul(elements, self.queries.transpose(0, 1))  # [g, h, L]
        for share, total, top, scores in zip(self.shares, self.totals, self.tops, self.scores, strict=True):
            _add_products(share, scores, start)
            torch.amax(share, 1, out=top)
            share.sub_(top.unsqueeze(1)).exp_()
            torch.sum(share, 1, out=total)
        tops = self.tops.masked_fill_(self.outside, -math.inf)
        tops.sub_(tops.amax(0)).exp_()
        positions = torch.mm(encodings, self.queries.flatten(1)).unflatten(1, self.tops.shape[1:])  # [U, g, L]
        positions.sub_(positions.amax(0)).clamp_(min=LEAST).exp_()
        sums = torch.zeros_like(self.weights[0])
        for weight, which, top, total in zip(self.weights, self.encoding_of, tops, self.totals, strict=True):
            torch.index_select(positions, 0, which, out=weight)
            weight.mul_(top)
            sums.addcmul_(weight, total)
        self.weights.mul_(sums.reciprocal_())

    def mean(self) -> Tensor:
        """The weighted mean of the values, summed over g: [D, V, L]."""
        self.out.zero_()
        for boths, means in zip(self.boths, self.means, strict=True):
            _add_products(self.both, boths, 0)
            _add_products(self.out, means)
        return self.out


class StreamsBackward(Streams):
    """The same with memory for gradients."""

    def __init__(self, q: Tensor, encoding_of: Tensor, size: int) -> None:
        super().__init__(q, encoding_of, size)
        self.grad_out, self.grad_both = torch.empty_like(self.out), torch.empty_like(self.both)
        self.grad_queries = torch.empty_like(self.queries)
        self.grad_keys, self.grad_values = torch.empty_like(self.keys), torch.empty_like(self.values)
        self.grad_near_keys, self.grad_near_values = self.near(self.grad_keys), self.near(self.grad_values)
        self.grad_shares, self.grad_weights = torch.empty_like(self.shares), torch.empty_like(self.weights)

        by_entry, by_key = self.grad_out.unsqueeze(2).unbind(0), self.grad_both.unsqueeze(2).unbind(1)  # [V, 1, L] each
        self.for_values = _pairs(self.both.unbind(0), self.grad_out.unsqueeze(2).unbind(1))
        self.for_both = [_pairs(by_entry, value.unbind(0)) for value in self.near_values]
        self.for_weights = [_pairs(by_key, share.unbind(1)) for share in self.shares]
        self.for_shares = [_pairs(weight.unbind(0), self.grad_both.unbind(0)) for weight in self.weights.unsqueeze(3)]
        by_query = self.queries.unsqueeze(2).unbind(1)  # [D, 1, L] each
        self.for_keys = [_pairs(grad.unbind(0), by_query) for grad in self.grad_shares]
        self.for_queries = [
            _pairs(grad.unbind(1), key.unsqueeze(2).unbind(1))
            for grad, key in zip(self.grad_shares, self.near_keys, strict=True)
        ]

    def differentiate(
        self, grad: Tensor, encodings: Tensor, elements: Tensor, grad_encodings: Tensor, grad_elements: Tensor
    ) -> None:
        """Fills the gradients of queries, keys and values, and adds to those of the encodings. `grad` is [n, D, V, H, W]."""
        self.images(self.grad_out).copy_(grad)
        self.grad_values.zero_()
        sums = torch.zeros_like(self.weights[0])
        for o, (weight, grad_weight) in enumerate(zip(self.weights, self.grad_weights, strict=True)):
            _add_products(self.both, self.boths[o], 0)
            _add_products(self.grad_near_values[o], self.for_values)
            _add_products(self.grad_both, self.for_both[o], 0)  # [V, h, L]
            _add_products(grad_weight, self.for_weights[o], 0)
            _add_products(self.grad_shares[o], self.for_shares[o], 0)
            sums.addcmul_(grad_weight, weight)
        grad_positions = self.queries.new_zeros(len(encodings), *sums.shape[1:])  # [U, g, L]
        for o, (weight, grad_weight) in enumerate(zip(self.weights, self.grad_weights, strict=True)):
            grad_total = torch.mul(sums, weight, out=self.both).sum(0)  # [g, L]
            self.grad_shares[o].sub_(grad_total.unsqueeze(1)).mul_(self.shares[o])  # now of the scores
            grad_weight.addcmul_(sums, self.totals[o], value=-1).mul_(weight)  # now of the positions' part of them
            grad_positions.index_add_(0, self.encoding_of[o], grad_weight)
        by_element, queries = self.grad_shares.sum(0), self.queries.transpose(0, 1)  # [g, h, L], [g, D, L]
        grad_elements += torch.matmul(by_element, queries.mT)
        grad_encodings += torch.mm(grad_positions.flatten(1), self.queries.flatten(1).T)
        torch.mm(encodings.T, grad_positions.flatten(1), out=self.grad_queries.view(len(self.queries), -1))
        self.grad_queries += torch.matmul(elements.mT, by_element).transpose(0, 1)
        self.grad_keys.zero_()
        for grad_key, for_key, for_query in zip(self.grad_near_keys, self.for_keys, self.for_queries, strict=True):
            _add_products(self.grad_queries, for_query)
            _add_products(grad_key, for_key)


S = TypeVar("S", bound=Streams)


def _parts(kind: type[S], q: Tensor, encoding_of: Tensor, size: int) -> Iterator[tuple[tuple[slice, int], S]]:
    """Streams to take at a time, some samples of one head, and the memory for them."""
    batch, heads, dim, order, height, width = q.shape
    count = max(1, CHUNK // (height * width * order * max(dim, encoding_of.shape[1])))
    parts = -(-batch // count)
    bounds = [batch * i // parts for i in range(parts + 1)]  # of about the same size: most use the same memory
    streams: S | None = None
    for start, stop in sorted(pairwise(bounds), key=lambda part: part[1] - part[0]):
        if streams is None or streams.shape[0] != stop - start:
            streams = kind(q[start:stop, 0], encoding_of, size)
        for head in range(heads):
            yield (slice(start, stop), head), streams


def _pairs(some: Sequence[Tensor], others: Sequence[Tensor]) -> Products:
    return list(zip(some, others, strict=True))


def _add_products(out: Tensor, pairs: Products, start: Tensor | int | None = None) -> None:
    """`out = start + the sum of products`; without a start, adds to what is in `out`."""
    rest = iter(pairs)
    if isinstance(start, Tensor):
        torch.addcmul(start, *next(rest), out=out)
    elif start == 0:
        torch.mul(*next(rest), out=out)
    for a, b in rest:
        out.addcmul_(a, b)
