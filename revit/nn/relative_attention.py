r"""Group self-attention with relative positions, G-SA (Eq. 5 of the paper; Romero and Cordonnier, 2021).

Where a neighbour is, as seen from the query, enters every score. At the output element v, a query of element g at x scores the
key of element h at y = x + o by

    s(v, g, h, o) = <q(x, g), k(y, h) + r(v^-1 o) + c(v^-1 o) + e(g^-1 h)> / sqrt(C_in),
    out(x, v) = W_out sum_g sum_{h, o} softmax over (h, o) of s(v, g, h, o) val(y, h).

Row, column and element encodings r, c and e are vectors of the key's space with a third of its entries each, so `P W_K` of Eq.
5 is learnt as one. They turn with the group: r and c see the offset turned back by v, and e the element of the key relative to
that of the query. Lifting is the same without g, h and e.

What is big in a score, (h, o) for every (x, g), does not depend on v, and what depends on v not on h. So the softmax is taken
in two steps, exactly: over h for each offset, which leaves one logit `log sum_h exp` and one mean value per offset, then over
the offsets for each v. That needs |G|^2 products per pair of pixels where the formula has |G|^3, and no encoding is ever stored
for a pair of tokens.

Letters: S streams (a head of a sample, at a pixel if attention is local), G elements, P queries and N neighbours of a stream, D
entries of a key.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revit.groups import Group
from revit.nn.convolution import Pointwise, check_features, check_fields
from revit.nn.local_attention import attend_local, multiply_adds
from revit.nn.tables import table

HIDDEN = 16
CHUNK = 2**22
"""Scores of global attention that are computed at once, and again in the backward pass."""


def attend_relative(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, elements: Tensor) -> Tensor:
    """The softmax above: q [S, G, P, D], k and v [S, N, G, D], positions [V, P, N, D], elements [G, G, D] -> [S, V, P, D].

    `positions` holds `r(v^-1 o) + c(v^-1 o)` and `elements` holds `e(g^-1 h)`.
    """
    scores = torch.einsum("sgpd,snhd->sgpnh", q, k) + torch.einsum("sgpd,ghd->sgph", q, elements).unsqueeze(3)
    totals = scores.logsumexp(-1)  # [S, g, P, N]
    means = torch.einsum("sgpnh,snhd->snpgd", (scores - totals.unsqueeze(-1)).exp(), v)
    logits = torch.einsum("sgpd,vpnd->svpgn", q, positions) + totals.transpose(1, 2).unsqueeze(1)  # [S, V, P, g, N]
    return torch.einsum("svpgn,snpgd->svpd", logits.softmax(-1), means)


def attend_map(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, scale: float
) -> Tensor:
    """Attention to the whole map, q, k, v [B, heads, D, G, H, W] -> [B, heads, D, V, H, W]; the rest as in `attend_local`.

    Some queries are taken at a time, and computed again in the backward pass instead of being kept.
    """
    batch, _, dim, order, height, width = q.shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    offsets = (rows - rows[:, None] + height - 1) * (2 * width - 1) + columns - columns[:, None] + width - 1  # [P, N]
    queries, keys, values = (x.flatten(0, 1).flatten(-2) for x in (q * scale, k, v))  # [S, D, G, N] each
    queries, keys, values = queries.permute(0, 2, 3, 1), keys.permute(0, 3, 2, 1), values.permute(0, 3, 2, 1)

    def part(queries: Tensor, keys: Tensor, values: Tensor, encodings: Tensor, elements: Tensor, which: Tensor) -> Tensor:
        positions = encodings[which].permute(2, 0, 1, 3)  # [V, p, N, D]
        return attend_relative(queries, keys, values, positions, elements)

    count = max(1, CHUNK // (len(queries) * order * height * width * max(order, dim)))
    parts = []
    for some, near in zip(queries.split(count, dim=2), offsets.to(q.device).split(count), strict=True):
        inputs = (some, keys, values, encodings, elements, encoding_of[near])
        parts.append(checkpoint(part, *inputs, use_reentrant=False) if torch.is_grad_enabled() else part(*inputs))
    out = torch.cat(parts, dim=2).permute(0, 3, 1, 2)  # [S, D, V, P]
    return out.unflatten(-1, (height, width)).unflatten(0, (batch, -1))


def attend_unfolded(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int, scale: float
) -> Tensor:
    """`attend_local` in operations that every exporter knows, as few as it takes, at several times its cost.

    Letters of the products: s streams, d entries, g and h elements, x pixels, n offsets, v output elements, u encodings.
    """
    batch, _, dim, order, height, width = q.shape
    queries = (q * scale).reshape(-1, dim, order, height * width)
    both = torch.cat((k, v), dim=2).flatten(2, 3).flatten(0, 1)  # [S, 2*D*G, H, W]
    keys, values, there = _unfold(both, size).split((dim * order, dim * order, 1), dim=1)
    keys, values = (part.unflatten(1, (dim, order)) for part in (keys, values))  # [S, D, G, N, HW]
    scores = torch.einsum("sdgx,sdhnx->sgxnh", queries, keys) + torch.einsum("sdgx,ghd->sgxh", queries, elements).unsqueeze(3)
    means = torch.einsum("sgxnh,sdhnx->sdgnx", scores.softmax(-1), values)
    totals = scores.logsumexp(-1).masked_fill(there.mT == 0, -math.inf)  # [S, G, HW, N]
    positions = torch.einsum("sdgx,ud->sgxu", queries, encodings).index_select(-1, encoding_of.T.flatten())
    logits = positions.unflatten(-1, encoding_of.T.shape) + totals.unsqueeze(3)  # [S, G, HW, V, N]
    out = torch.einsum("sgxvn,sdgnx->sdvx", logits.softmax(-1), means)
    return out.reshape(batch, -1, dim, out.shape[2], height, width)


def _unfold(x: Tensor, size: int) -> Tensor:
    """[S, C, H, W] -> [S, C + 1, size*size, H*W]: the pixels around each pixel, zero outside the image, and a last map that is
    one inside. As two convolutions that copy, of columns and of rows: other ways take a dozen operations in a file."""
    channels, height, width = x.shape[1:]
    copies, beyond = torch.eye(size, dtype=x.dtype, device=x.device), size // 2
    x = F.pad(x, (0, 0, 0, 0, 0, 1), value=1.0).reshape(-1, 1, height, width)
    x = F.conv2d(x, copies.view(size, 1, size, 1), padding=(beyond, 0)).reshape(-1, 1, height, width)
    x = F.conv2d(x, copies.view(size, 1, 1, size), padding=(0, beyond))
    return x.reshape(-1, channels + 1, size * size, height * width)


class OffsetEncoding(nn.Module):
    """A number in [-1, 1] to a vector, [...] -> [..., dim], by a small network: the encoding of a row or of a column."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, HIDDEN), nn.LayerNorm(HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unsqueeze(-1))
        return out


@table
def turned_offsets(group: Group, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The offsets `v^-1 o` of a neighbourhood of rows x columns pixels (both odd), each distinct one once: points [U, 2],
    (x, y) in pixels, float64; and which of them an offset is at an element, [rows * columns, G]. Offsets go row by row from
    the top left."""
    y, x = torch.meshgrid(rows // 2 - torch.arange(rows), torch.arange(columns) - columns // 2, indexing="ij")
    offsets = torch.stack((x, y), dim=-1).flatten(0, 1).double()
    turned = torch.einsum("oi,vij->ovj", offsets, group.matrix)  # rows times R = R^-1 on columns
    points, index = torch.unique((turned * 1e9).round().flatten(0, 1), dim=0, return_inverse=True)
    return points / 1e9, index.view(rows * columns, group.order)


class RelativeSelfAttention(nn.Module):
    """G-SA with `num_heads` heads of `mid_channels` entries: [B, C_in, G, H, W] -> [B, C_out, G, H, W].

    `patch_size` is the side of the neighbourhood of a pixel (odd), None the whole map. `lifting` takes images [B, C_in, H, W].
    The encodings of a neighbourhood see offsets scaled to [-1, 1]; for the whole map that is the size of the map.
    """

    def __init__(
        self, group: Group | str, in_channels: int, out_channels: int, *, num_heads: int, mid_channels: int,
        patch_size: int | None = 5, lifting: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = Group.parse(group)
        self.in_channels, self.out_channels = check_fields(in_channels, out_channels)
        if not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"num_heads must be a whole number >= 1, got {num_heads!r}")
        if patch_size is not None and (not isinstance(patch_size, int) or patch_size < 1 or patch_size % 2 == 0):
            raise ValueError(f"patch_size is an odd number of pixels, or None for the whole map; got {patch_size!r}")
        parts = 2 if lifting else 3
        if mid_channels < parts:
            raise ValueError(f"a key of {mid_channels} entries has no room for {parts} encodings; choose at least {parts}")
        self.num_heads, self.mid_channels, self.patch_size, self.lifting = num_heads, mid_channels, patch_size, lifting
        across = mid_channels // parts
        self.row, self.column = OffsetEncoding(across), OffsetEncoding(mid_channels // 2 if lifting else across)
        self.elements = None if lifting else nn.Parameter(torch.randn(self.group.order, mid_channels - 2 * across))
        self.qkv = Pointwise(in_channels, 3 * num_heads * mid_channels)
        self.proj = Pointwise(num_heads * mid_channels, out_channels)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def attention_multiply_adds(self, height: int, width: int) -> int:
        """Products of queries with keys and encodings, and of weights with values, on a map of this size, of one image."""
        sides = self._sides(height, width)
        points, _ = turned_offsets(self.group, *sides)
        order = 1 if self.lifting else self.group.order
        pixels = height * width
        if self.patch_size is None:
            scores = order * (pixels + 1) + self.group.order * pixels
            values = (self.group.order + (order if order > 1 else 0)) * pixels  # one element has no mean to take
            one = pixels * order * self.mid_channels * (scores + values)
        else:
            one = multiply_adds(pixels, order, self.group.order, self.mid_channels, sides[0] * sides[1], len(points))
        return self.num_heads * one

    def forward(self, x: Tensor) -> Tensor:
        if self.lifting:
            if x.ndim != 4 or x.shape[1] != self.in_channels:
                raise ValueError(f"expected images [B, {self.in_channels}, H, W], got shape {list(x.shape)}")
            x = x.unsqueeze(2)
        else:
            check_features(x, self.in_channels, self.group)
        height, width = x.shape[-2:]
        exact = torch.promote_types(self.qkv.weight.dtype, torch.float32)  # scores are not taken in half precision
        parts = self.qkv(x).to(exact).unflatten(1, (3, self.num_heads, self.mid_channels))
        q, k, v = parts.unbind(1)  # [B, heads, D, G, H, W] each
        points, encoding_of = turned_offsets(self.group, *self._sides(height, width))
        reach = max(1, (max(height, width) - 1) if self.patch_size is None else self.patch_size // 2)
        encodings, encoding_of = self._encode(points.to(q) / reach).to(exact), encoding_of.to(q.device)
        inputs = (q, k, v, encodings, self._relative_elements(q), encoding_of)
        scale = 1 / math.sqrt(self.in_channels)
        with torch.autocast(x.device.type, enabled=False):
            if self.patch_size is None:
                out = attend_map(*inputs, scale)
            elif torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
                out = attend_unfolded(*inputs, self.patch_size, scale)
            else:
                out = attend_local(*inputs, self.patch_size, scale)
        return self.proj(out.flatten(1, 2).to(x.dtype))

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of all offsets from a pixel."""
        if self.patch_size is None:
            return 2 * height - 1, 2 * width - 1
        return self.patch_size, self.patch_size

    def _encode(self, points: Tensor) -> Tensor:
        """Row and column encodings of offsets (x, y) in [-1, 1], as vectors of the key's space: [U, 2] -> [U, D]."""
        parts = torch.cat((self.row(points[:, 1]), self.column(points[:, 0])), dim=1)
        return F.pad(parts, (0, self.mid_channels - parts.shape[1]))

    def _relative_elements(self, like: Tensor) -> Tensor:
        """`e(g^-1 h)` as vectors of the key's space, [G, G, D]; lifting has one element and no encoding."""
        if self.elements is None:
            return like.new_zeros(1, 1, self.mid_channels)
        relative = self.group.product[self.group.inverse].to(like.device)  # [g, h]: g^-1 h
        return F.pad(self.elements[relative].to(like), (self.mid_channels - self.elements.shape[1], 0))

    def extra_repr(self) -> str:
        where = "the whole map" if self.patch_size is None else f"{self.patch_size} x {self.patch_size}"
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields, {self.num_heads} heads, {where}"
