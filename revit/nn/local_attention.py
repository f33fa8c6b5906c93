r"""Local attention with relative positions, as a loop over the offsets of a neighbourhood: `attend_relative` for K x K pixels.

Written as matrix products, local attention is millions of products of 4 x 4 or 8 x 8 matrices, one for each pixel and offset,
and unfolds keys and values K^2 times. Here the pixels are the innermost axis instead, row after row and stream after stream, so
the neighbours at an offset (i, j) are the same tensor from entry `i * W + j` on: nothing is unfolded, and every step is one
multiply-add of long vectors that stay in the cache, for a row of offsets at a time. Neighbours that are not there are computed
too, and get no weight.

The backward pass is written out: it computes the weights again, some streams at a time, and keeps nothing but the inputs.

Letters: S streams, G elements of a query or key, V elements of the output, D entries of a key, K rows and K columns of offsets,
L pixels of all streams that are taken at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from revit.nn.threads import on_threads

CHUNK = 2**17
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

    def work(parts: list[Part]) -> None:
        for part, streams in _with_memory(Streams, parts, q, encodings, encoding_of, size):
            streams.load(q[part], k[part], v[part], scale)
            streams.share(encodings, elements)
            out[part] = streams.images(streams.mean())

    on_threads(work, _parts(q, encoding_of))
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
    middle = size // 2

    def work(parts: list[Part]) -> tuple[Tensor, Tensor]:
        grad_encodings, grad_elements = torch.zeros_like(encodings), torch.zeros_like(elements)
        for part, streams in _with_memory(StreamsBackward, parts, q, encodings, encoding_of, size):
            streams.load(q[part], k[part], v[part], scale)
            streams.share(encodings, elements)
            streams.differentiate(grad[part], encodings, elements, grad_encodings, grad_elements)
            torch.mul(streams.images(streams.grad_queries), scale, out=grad_q[part])
            grad_k[part] = streams.images(streams.grad_near_keys[middle][middle])
            grad_v[part] = streams.images(streams.grad_near_values[middle][middle])
        return grad_encodings, grad_elements

    some = on_threads(work, _parts(q, encoding_of))
    grad_encodings, grad_elements = (torch.stack(grads).sum(0) for grads in zip(*some, strict=True))
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


Part = tuple[slice, int]
"""Samples and a head."""
Products = list[tuple[Tensor, Tensor, Tensor]]
"""Where products are added, and their factors, which broadcast."""


class Streams:
    """Memory for some streams, and each view of it that a step needs.

    Both are made once and used for all streams, some at a time: memory that is new to a process, and thousands of small views,
    would cost as much as the arithmetic. The attention weights are never formed: they have two factors, `shares[j, i, g, h]`
    for offset (i, j), query g and key h, which are kept, and `weigh(j)[i, v, g]` for output v, computed where it is needed.
    """

    def __init__(self, q: Tensor, encodings: int, encoding_of: Tensor, size: int) -> None:
        streams, dim, order, height, width = q.shape
        outputs = encoding_of.shape[1]
        self.shape, self.size = (streams, height, width), size
        self.length, self.margin = streams * height * width, size // 2 * (width + 1)
        new = q.new_empty
        self.queries = new(dim, order, self.length)
        self.keys, self.values = q.new_zeros(2, dim, order, self.margin + self.length + self.margin)
        self.near_keys, self.near_values = self.near(self.keys), self.near(self.values)
        self.outside = self._outside(q.device)
        self.shares = new(size, size, order, order, self.length)
        """`exp(score)` without the positions, divided by the largest over h."""
        self.totals, self.tops = new(2, size, size, order, self.length)
        """The sums of shares over h; what the shares were divided by, up to a factor for each query."""
        self.positions = new(encodings, order, self.length)
        """`exp` of the scores of the positions, up to a factor for each query."""
        self.scales = new(outputs, order, self.length)
        """What makes the products of all factors add up to 1 over offsets and h."""
        self.weights, self.both = new(2, size, outputs, order, self.length)
        self.out = new(dim, outputs, self.length)

        self.which = encoding_of.view(size, -1).tolist()
        self.turned = [[self.positions[u] for u in row] for row in self.which]  # [g, L] for each column and output
        self.weights_of = self.weights.flatten(0, 1).unbind(0)
        entries = self.queries.unsqueeze(2).unbind(0)  # [g, 1, L] each
        self.scores = [
            _products(share, entries, near.unsqueeze(1).unbind(2))
            for share, near in zip(self.shares, self.near_keys, strict=True)
        ]
        weights = self.weights.unsqueeze(3).unbind(2)  # [K, V, 1, L] each
        self.boths = [_products(self.both, weights, share.unsqueeze(1).unbind(2)) for share in self.shares]
        self.means = [
            [pair for both, value in zip(self.both, near, strict=True)
             for pair in _products(self.out, both.unbind(1), value.unsqueeze(2).unbind(1))]
            for near in self.near_values
        ]  # fmt: skip

    def near(self, keys: Tensor) -> list[Tensor]:
        """The neighbours of every pixel, a row of offsets from the top after the other: views [K, ..., L] into keys."""
        starts = [self.margin + down * self.shape[2] - self.size // 2 for down in self._steps()]
        shape, strides = (self.size, *keys.shape[:-1], self.length), (1, *keys.stride())
        return [keys.as_strided(shape, strides, keys.storage_offset() + start) for start in starts]

    def _steps(self) -> range:
        return range(-(self.size // 2), self.size // 2 + 1)

    def _outside(self, device: torch.device) -> Tensor:
        """Where there is no such neighbour, [K, K, 1, L]: beyond a row is a pixel of the next one, beyond an image another."""
        streams, height, width = self.shape
        steps = torch.tensor(self._steps(), device=device)[:, None]
        rows, columns = steps + torch.arange(height, device=device), steps + torch.arange(width, device=device)
        near_rows, near_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)  # [K, H], [K, W]
        inside = near_rows[:, None, :, None] & near_columns[None, :, None, :]
        return ~inside.flatten(2).repeat(1, 1, streams).unsqueeze(2)

    def images(self, x: Tensor) -> Tensor:
        """[A, B, L] -> [n, A, B, H, W]"""
        return x.unflatten(-1, self.shape).movedim(2, 0)

    def load(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        torch.mul(q, scale, out=self.images(self.queries))
        middle = self.size // 2
        self.images(self.near_keys[middle][middle]).copy_(k)
        self.images(self.near_values[middle][middle]).copy_(v)

    def share(self, encodings: Tensor, elements: Tensor) -> None:
        """Fills `shares`, `totals`, `tops`, `positions` and `scales`."""
        start = torch.matmul(elements, self.queries.transpose(0, 1))  # [g, h, L]
        for share, total, top, scores in zip(self.shares, self.totals, self.tops, self.scores, strict=True):
            _set_to_products(scores, start)
            torch.amax(share, 2, out=top)
            share.sub_(top.unsqueeze(2)).exp_()
            torch.sum(share, 2, out=total)
        tops = self.tops.masked_fill_(self.outside, -math.inf)
        tops.sub_(tops.amax((0, 1))).exp_()
        torch.mm(encodings, self.queries.flatten(1), out=self.positions.flatten(1))
        self.positions.sub_(self.positions.amax(0)).clamp_(min=LEAST).exp_()
        self.scales.zero_()
        scales = self.scales.unbind(0)
        for turned, sums in zip(self.turned, tops * self.totals, strict=True):
            sums_of = [total for total in sums for _ in scales]
            _add_products([*zip(scales * self.size, turned, sums_of, strict=True)])
        self.scales.reciprocal_()

    def weigh(self, row: int) -> Tensor:
        """The other factor at a row of offsets, [K, V, g, L]: the same memory for each."""
        torch.mul(self.scales, self.tops[row].unsqueeze(1), out=self.weights)
        torch._foreach_mul_(self.weights_of, self.turned[row])
        return self.weights

    def mean(self) -> Tensor:
        """The weighted mean of the values, summed over g: [D, V, L]."""
        self.out.zero_()
        for row, (boths, means) in enumerate(zip(self.boths, self.means, strict=True)):
            self.weigh(row)
            _set_to_products(boths)
            _add_products(means)
        return self.out


class StreamsBackward(Streams):
    """The same with memory for gradients."""

    def __init__(self, q: Tensor, encodings: int, encoding_of: Tensor, size: int) -> None:
        super().__init__(q, encodings, encoding_of, size)
        self.grad_out, self.grad_both = torch.empty_like(self.out), torch.empty_like(self.both)
        self.grad_queries, self.grad_shares = torch.empty_like(self.queries), torch.empty_like(self.shares)
        self.grad_keys, self.grad_values = torch.empty_like(self.keys), torch.empty_like(self.values)
        self.grad_near_keys, self.grad_near_values = self.near(self.grad_keys), self.near(self.grad_values)
        self.grad_positions, self.grad_weights = torch.empty_like(self.positions), torch.empty_like(self.weights)
        self.sums = torch.empty_like(self.scales)

        self.grad_turned = [[self.grad_positions[u] for u in row] for row in self.which]
        by_output, by_entry = self.grad_out.unsqueeze(2).unbind(1), self.grad_out.unsqueeze(2).unbind(0)
        by_key = self.grad_both.unsqueeze(3).unbind(2)  # [K, V, 1, L] each
        by_weight, by_both = self.weights.unsqueeze(3).unbind(1), self.grad_both.unsqueeze(2).unbind(1)
        by_query = self.queries.unsqueeze(2).unbind(1)  # [D, 1, L] each
        self.for_values: list[Products] = []
        self.for_both: list[Products] = []
        self.for_weights: list[Products] = []
        self.for_shares: list[Products] = []
        self.for_positions: list[Products] = []
        self.for_queries: list[Products] = []
        self.for_keys: list[Products] = []
        grad_weights_of = self.grad_weights.flatten(0, 1).unbind(0)
        for row in range(size):
            share, grad_share = self.shares[row], self.grad_shares[row]
            self.for_values.append(
                [pair for grad, both in zip(self.grad_near_values[row], self.both, strict=True)
                 for pair in _products(grad, both.unbind(0), by_output)]
            )  # fmt: skip
            self.for_both.append(_products(self.grad_both, by_entry, self.near_values[row].unsqueeze(1).unbind(2)))
            self.for_weights.append(_products(self.grad_weights, by_key, share.unsqueeze(1).unbind(3)))
            self.for_shares.append(_products(grad_share, by_weight, by_both))
            self.for_positions.append([*zip(self.grad_turned[row], grad_weights_of, self.weights_of, strict=True)])
            self.for_queries.append(
                [pair for grad, key in zip(grad_share, self.near_keys[row], strict=True)
                 for pair in _products(self.grad_queries, grad.unbind(1), key.unsqueeze(2).unbind(1))]
            )  # fmt: skip
            self.for_keys.append(
                [pair for grad_key, grad in zip(self.grad_near_keys[row], grad_share, strict=True)
                 for pair in _products(grad_key, grad.unbind(0), by_query)]
            )  # fmt: skip
        self.for_sums = _products(self.sums, self.grad_weights, self.weights)

    def differentiate(
        self, grad: Tensor, encodings: Tensor, elements: Tensor, grad_encodings: Tensor, grad_elements: Tensor
    ) -> None:
        """Fills the gradients of queries, keys and values, and adds to those of the encodings. `grad` is [n, D, V, H, W]."""
        self.images(self.grad_out).copy_(grad)
        for x in (self.grad_values, self.grad_keys, self.grad_positions, self.sums):
            x.zero_()
        for row in range(self.size):
            self.weigh(row)
            _set_to_products(self.boths[row])
            _add_products(self.for_values[row])
            _set_to_products(self.for_both[row])
            _set_to_products(self.for_shares[row])
            _set_to_products(self.for_weights[row])
            _add_products(self.for_sums)
            _add_products(self.for_positions[row])
        # The softmax takes from every gradient its mean, `sums`, in proportion to the weights.
        for row, (shares, grad_shares) in enumerate(zip(self.shares, self.grad_shares, strict=True)):
            taken = self.weigh(row).mul_(self.sums)  # [K, V, g, L]
            grad_shares.sub_(taken.sum(1).unsqueeze(2)).mul_(shares)  # now of the scores
            totals = [total for total in self.totals[row] for _ in self.scales]
            _add_products([*zip(self.grad_turned[row], self.weights_of, totals, strict=True)], -1)
        by_element, queries = self.grad_shares.sum((0, 1)), self.queries.transpose(0, 1)  # [g, h, L], [g, D, L]
        grad_elements += torch.matmul(by_element, queries.mT)
        grad_encodings += torch.mm(self.grad_positions.flatten(1), self.queries.flatten(1).T)
        torch.mm(encodings.T, self.grad_positions.flatten(1), out=self.grad_queries.flatten(1))
        self.grad_queries += torch.matmul(elements.mT, by_element).transpose(0, 1)
        for for_queries, for_keys in zip(self.for_queries, self.for_keys, strict=True):
            _add_products(for_queries)
            _add_products(for_keys)


S = TypeVar("S", bound=Streams)


def _parts(q: Tensor, encoding_of: Tensor) -> list[Part]:
    """Streams to take at a time, some samples of one head: of about the same size, the smaller first."""
    batch, heads, dim, order, height, width = q.shape
    count = max(1, CHUNK // (height * width * order * max(dim, encoding_of.shape[1])))
    parts = -(-batch // count)  # none of an empty batch
    bounds = pairwise([batch * i // parts for i in range(parts + 1)] if parts else [])
    ordered = sorted((slice(*part) for part in bounds), key=lambda part: part.stop - part.start)
    return [(part, head) for part in ordered for head in range(heads)]


def _with_memory(
    kind: type[S], parts: list[Part], q: Tensor, encodings: Tensor, encoding_of: Tensor, size: int
) -> Iterator[tuple[Part, S]]:
    """Each part with memory for it: most are of the same size and use the same."""
    streams: S | None = None
    for part in parts:
        samples = q[part]
        if streams is None or streams.shape[0] != len(samples):
            streams = kind(samples, len(encodings), encoding_of, size)
        yield part, streams


def _products(out: Tensor, some: Iterable[Tensor], others: Iterable[Tensor]) -> Products:
    return [(out, a, b) for a, b in zip(some, others, strict=True)]


def _add_products(products: Products, value: int = 1) -> None:
    """Adds each product where it belongs, times `value`. One call for all: Python would take a third of the time."""
    if products[0][0].is_cpu:
        outs, some, others = zip(*products, strict=True)
        torch._foreach_addcmul_(outs, some, others, value=value)
    else:  # in parallel, several products for the same place would meet
        for out, a, b in products:
            out.addcmul_(a, b, value=value)


def _set_to_products(products: Products, start: Tensor | None = None) -> None:
    """The sum of products, all of one place, and of `start`."""
    (out, a, b), *rest = products
    torch.mul(a, b, out=out) if start is None else torch.addcmul(start, a, b, out=out)
    if rest:
        _add_products(rest)
