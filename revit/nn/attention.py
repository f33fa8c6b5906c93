r"""Group convolutional self-attention, G-CSA (Eqs. 8 to 10 of the paper).

    Q = W_Q * F,  K = W_K * F,  V = W_V * F                                                       (8, `ConvProjection`)
    G-CSA(x, g) = sum_{y in N(x)} sum_{h in G} A(x, g; y, h) V(y, h)                              (9, `attend`)
    A(x, g; y, h) = softmax over (y, h) of <Q(x, g), K(y, h)> / sqrt(d_k)                         (10, `attend`)

Three readings of "attention on the group", all equivariant, differ in what a token is:

| `attention`   | a token is            | its vector is                  | scores per head       |
|---------------|-----------------------|--------------------------------|-----------------------|
| `joint`       | a (position, element) | the fields of the head         | (G * positions)^2     |
| `spatial`     | a position            | the fields times the elements  | positions^2           |
| `per_element` | a position, for each g| the fields of the head         | G * positions^2       |

`joint` is what Eqs. 9-10 say; `spatial` is what the released code computes. N(x) is the whole map (`global`), the window
that x lies in (`window`) or the K x K pixels around x (`local`). On the whole map keys and values can be means of r x r pixels
(`kv_reduction`), which turn with the map as pixels do: r^2 times fewer scores.

Letters: B batch, N neighbourhoods, C fields, D fields per head, G elements, P positions in a neighbourhood.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.exactness import Tiling, WindowGuard
from revit.groups import Group
from revit.nn.algorithm import Chain
from revit.nn.convolution import GroupConv, GroupLinear, check_features
from revit.nn.dropout import check_rate, make_dropout
from revit.nn.fourier import Sight
from revit.nn.fourier_attention import attend_coefficients
from revit.nn.neighbourhoods import join_windows, reduce_map, split_windows, spread_parts, unfold_neighbours

ATTENTIONS = ("joint", "spatial", "per_element")
NEIGHBOURHOODS = ("global", "window", "local")
PROJECTIONS = ("full", "separable")
SCORES, SCORES_OF_SAMPLE = 6, 2**17
"""Times the numbers of a map that stored scores may be, and how many of a sample: with more, some maps are slower than fused
attention, which keeps none of them."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, attention: str, num_heads: int, key_mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    r"""Eqs. 9 and 10 inside neighbourhoods: q [B, N, C, G, P], k and v [B, N, C, G, P'] -> [B, N, C, G, P].

    `key_mask` [N, P'] is True where a key exists. Heads split the fields, never the elements of a field. The matrix of
    scores is never stored: `scaled_dot_product_attention` is fused (except with attention dropout on the CPU).
    """
    mask = None
    if key_mask is not None:
        order = k.shape[3]
        streams = num_heads * (order if attention == "per_element" else 1)
        exists = key_mask.repeat(1, order) if attention == "joint" else key_mask  # [N, keys of a token]
        mask = exists.repeat_interleave(streams, dim=0)[None, :, None]  # [1, N*streams, 1, keys]
    # Fused kernels want the vectors of tokens contiguous; on views they would silently store all scores instead.
    queries, keys, values = (_to_tokens(x, attention, num_heads).contiguous() for x in (q, k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
    return _from_tokens(out, attention, num_heads, q.shape)


def _to_tokens(x: Tensor, attention: str, num_heads: int) -> Tensor:
    """[B, N, C, G, P] -> [B, streams, tokens, vector]: streams attend independently of each other."""
    x = x.unflatten(2, (num_heads, -1))  # [B, N, heads, D, G, P]
    if attention == "spatial":
        return x.permute(0, 1, 2, 5, 3, 4).flatten(4).flatten(1, 2)  # [B, N*heads, P, D*G]
    x = x.permute(0, 1, 2, 4, 5, 3)  # [B, N, heads, G, P, D]
    if attention == "joint":
        return x.flatten(3, 4).flatten(1, 2)  # [B, N*heads, G*P, D]
    return x.flatten(1, 3)  # [B, N*heads*G, P, D]


def _from_tokens(tokens: Tensor, attention: str, num_heads: int, shape: torch.Size) -> Tensor:
    """The inverse of `_to_tokens`, to [B, N, C, G, P]."""
    batch, neighbourhoods, channels, order, positions = shape
    dim = channels // num_heads
    if attention == "spatial":
        x = tokens.reshape(batch, neighbourhoods, num_heads, positions, dim, order).permute(0, 1, 2, 4, 5, 3)
    else:
        x = tokens.reshape(batch, neighbourhoods, num_heads, order, positions, dim).permute(0, 1, 2, 5, 3, 4)
    return x.reshape(shape)


def attend_windows(q: Tensor, k: Tensor, v: Tensor, rows: Tiling, columns: Tiling, **options: Any) -> Tensor:
    """G-CSA of maps [B, C, G, H, W] with N(x) the window of x; one window of the size of the map is the whole map."""
    height, width = q.shape[-2:]
    mask = None
    if rows.padded or columns.padded:
        inside = torch.ones(1, 1, 1, height, width, device=q.device)
        mask = split_windows(inside, rows, columns)[0, :, 0, 0] > 0  # [N, P]
    queries, keys, values = (split_windows(x, rows, columns) for x in (q, k, v))
    out = attend(queries, keys, values, key_mask=mask, **options)
    return join_windows(out, rows, columns, height, width)


def attend_map(q: Tensor, k: Tensor, v: Tensor, reduction: int, **options: Any) -> Tensor:
    """G-CSA of maps [B, C, G, H, W] with N(x) the whole map, or the means of its parts of reduction x reduction pixels."""
    queries = q.flatten(-2)  # [B, C, G, P]
    keys, values = (reduce_map(x, reduction).flatten(-2) for x in (k, v))  # [B, C, G, P']
    if _scores_pay(queries, keys, **options):
        out = attend_positions(queries, keys, values, options["num_heads"])
    else:
        out = attend(*(x.unsqueeze(1) for x in (queries, keys, values)), **options).squeeze(1)
    return out.unflatten(-1, q.shape[-2:])


def attend_positions(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """`spatial` attention of q [B, C, G, P] to k and v [B, C, G, P'] -> [B, C, G, P], with its scores stored.

    On maps as they lie in memory: with one product for the scores and one for the sums nothing has to be turned into tokens and
    back, which on a CPU costs more than scores of small maps do.
    """
    dim = q.shape[1] // num_heads
    heads = zip(*(x.split(dim, dim=1) if num_heads > 1 else [x] for x in (q, k, v)), strict=True)  # [B, D, G, P]
    found = []
    for queries, keys, values in (tuple(x.flatten(1, 2) for x in head) for head in heads):  # [B, D*G, P]
        weights = torch.bmm((queries * queries.shape[1] ** -0.5).mT, keys).softmax(-1)  # [B, P, P']
        found.append(torch.bmm(values, weights.mT))  # [B, D*G, P]
    out = torch.cat(found, dim=1) if num_heads > 1 else found[0]
    return out.view_as(q)


def _scores_pay(q: Tensor, k: Tensor, *, attention: str, num_heads: int, dropout: float = 0.0) -> bool:
    """Whether to store scores: on a CPU, in programs that run as they are written, if they are few beside the map itself."""
    eager = not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None)
    scores, numbers = num_heads * q.shape[-1] * k.shape[-1], q.shape[-1] * q.shape[1] * q.shape[2]
    few = scores <= min(SCORES * numbers, SCORES_OF_SAMPLE)
    return attention == "spatial" and dropout == 0 and q.is_cpu and eager and few


def attend_neighbours(q: Tensor, k: Tensor, v: Tensor, size: int, **options: Any) -> Tensor:
    """G-CSA of maps [B, C, G, H, W] with N(x) the size x size pixels around x (size odd); those outside are masked."""
    height, width = q.shape[-2:]
    mask = unfold_neighbours(torch.ones(1, 1, 1, height, width, device=q.device), size)[0, :, 0, 0] > 0  # [H*W, size*size]
    queries = q.flatten(-2).movedim(-1, 1).unsqueeze(-1)  # [B, H*W, C, G, 1]
    out = attend(queries, unfold_neighbours(k, size), unfold_neighbours(v, size), key_mask=mask, **options)
    return out.squeeze(-1).movedim(1, -1).unflatten(-1, (height, width))


class ConvProjection(nn.Module):
    r"""Eq. 8, all three at once: `Q, K, V = W_Q * F, W_K * F, W_V * F`, [B, C, G, H, W] -> three of the same shape.

    `full` is one K x K group convolution C -> 3C (the released code). `separable` convolves each field with a K x K filter
    of its own and then mixes the fields by a 1x1 group convolution (what CvT does), at a fraction of the cost.
    """

    def __init__(self, group: Group, channels: int, kernel_size: int, *, projection: str, filters: str) -> None:
        super().__init__()
        if projection not in PROJECTIONS:
            raise ValueError(f"unknown projection {projection!r}; choose {', '.join(PROJECTIONS)}")
        if kernel_size % 2 == 0:
            raise ValueError(
                f"the kernel of q, k and v must be odd to keep the size, got {kernel_size}; "
                f"nearest: {kernel_size - 1} and {kernel_size + 1}"
            )
        same: dict[str, Any] = {"padding": kernel_size // 2, "bias": False, "filters": filters}
        self.depthwise: nn.Module = nn.Identity()
        self.mix: GroupConv | GroupLinear = GroupLinear(group, channels, 3 * channels, bias=False)
        if kernel_size > 1 and projection == "full":
            self.mix = GroupConv(group, channels, 3 * channels, kernel_size, **same)
        elif kernel_size > 1:
            self.depthwise = GroupConv(group, channels, channels, kernel_size, groups=channels, **same)

    @property
    def sight(self) -> Sight | None:
        """How the mixed fields are seen in the Fourier basis."""
        return Sight(self.mix.filters.filters, self.mix.sampling) if isinstance(self.mix, GroupConv) else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.mix(self.depthwise(x)).chunk(3, dim=1)
        return q, k, v


class GroupConvAttention(nn.Module):
    r"""Multi-head G-CSA: `W_out * concat_heads G-CSA(F)`, [B, C, G, H, W] -> [B, C, G, H, W].

    `window_size` is the side of the windows (`window`) or of the pixels around each pixel (`local`, odd). `shifted` moves the
    windows by half their (even) size. `kv_reduction` is the side of the parts of the map whose means are keys and values
    (`global`). `dropout` drops fields of the output, `attn_dropout` attention weights.
    """

    def __init__(
        self,
        group: Group | str,
        channels: int,
        num_heads: int,
        *,
        kernel_size: int = 3,
        attention: str = "joint",
        neighbourhood: str = "global",
        window_size: int = 7,
        shifted: bool = False,
        kv_reduction: int = 1,
        projection: str = "separable",
        filters: str = "auto",
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        elementwise_dropout: bool = False,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.group = Group.parse(group)
        self.channels, self.num_heads = channels, check_heads(channels, num_heads)
        if attention not in ATTENTIONS:
            raise ValueError(f"unknown attention {attention!r}; choose {', '.join(ATTENTIONS)}")
        if neighbourhood not in NEIGHBOURHOODS:
            raise ValueError(f"unknown neighbourhood {neighbourhood!r}; choose {', '.join(NEIGHBOURHOODS)}")
        if window_size < 1 or (neighbourhood == "local" and window_size % 2 == 0):
            kind = "odd and >= 1" if neighbourhood == "local" else ">= 1"
            raise ValueError(f"window_size must be {kind} for {neighbourhood} attention, got {window_size}")
        if shifted and neighbourhood != "window":
            raise ValueError(f"only windows can be shifted, got neighbourhood={neighbourhood!r}")
        if not isinstance(kv_reduction, int) or kv_reduction < 1:
            raise ValueError(f"kv_reduction must be a whole number >= 1, got {kv_reduction!r}")
        if kv_reduction > 1 and neighbourhood != "global":
            raise ValueError(f"kv_reduction={kv_reduction} needs neighbourhood='global', got {neighbourhood!r}")
        self.attention, self.neighbourhood, self.kv_reduction = attention, neighbourhood, kv_reduction
        self.windows = WindowGuard(self.group, window_size, shifted=shifted, strict=strict)
        self.attn_dropout = check_rate("attn_dropout", attn_dropout)
        self.qkv = ConvProjection(self.group, channels, kernel_size, projection=projection, filters=filters)
        self.proj = GroupLinear(self.group, channels, channels, bias=False)
        self.proj_drop = make_dropout(dropout, elementwise=elementwise_dropout, inplace=True)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the input; raises where windows cannot tile it symmetrically (or warns, if not strict)."""
        if self.neighbourhood == "window":
            self.windows.tilings(height, width)
        return height, width

    def attention_multiply_adds(self, height: int, width: int) -> int:
        """Products of queries with keys and of weights with values on a map of this size, of one image.

        2 |G| C times the pairs of a pixel and a neighbour, (HW)^2 on the whole map, fewer with `kv_reduction`, and HW w^2 in
        windows of w (those that padding adds are counted, for they are computed); `joint` pairs elements as well, which makes
        it |G| times that.
        """
        if self.neighbourhood == "local":
            pairs = height * width * self.windows.window**2
        elif self.neighbourhood == "global":
            pairs = height * width * -(-height // self.kv_reduction) * -(-width // self.kv_reduction)
        else:
            rows, columns = self.windows.tilings(height, width)
            padded = (height + rows.before + rows.after) * (width + columns.before + columns.after)
            pairs = padded * rows.side * columns.side
        elements = self.group.order**2 if self.attention == "joint" else self.group.order
        return 2 * elements * self.channels * pairs

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale`, a number, multiplies the result: the output projection takes it."""
        check_features(x, self.channels, self.group)
        options: dict[str, Any] = {"attention": self.attention, "num_heads": self.num_heads}
        options["dropout"] = self.attn_dropout if self.training else 0.0
        if self._stays_in_basis(x, options):
            blocks, sight = self.qkv.mix.filters.blocks(), self.qkv.sight
            x = self.qkv.depthwise(x)
            second = self.proj.filters.blocks()
            second = second if scale is None else [block * scale for block in second]
            return self.proj_drop(attend_coefficients(x, blocks, second, self.num_heads, self.group, sight))
        q, k, v = self.qkv(x)
        height, width = x.shape[-2:]
        if self.neighbourhood == "local":
            out = attend_neighbours(q, k, v, self.windows.window, **options)
        elif self.neighbourhood == "window":
            out = attend_windows(q, k, v, *self.windows.tilings(height, width), **options)
        else:
            out = attend_map(q, k, v, self.kv_reduction, **options)
        return self.proj_drop(self.proj(out) if scale is None else self.proj.scaled(out, scale))

    def _stays_in_basis(self, x: Tensor, options: dict[str, Any]) -> bool:
        """Whether queries, keys and values stay in the Fourier basis: in training, if they are computed there, and scores are
        stored, of all pixels with all."""
        plain = self.neighbourhood == "global" and self.kv_reduction == 1 and not torch.is_autocast_enabled("cpu")
        if not plain or not torch.is_grad_enabled() or not _scores_pay(x.flatten(-2), x.flatten(-2), **options):
            return False
        return self.chain.is_fourier_for(x)

    @property
    def takes_scale(self) -> bool:
        """Not if the projection was made a plain convolution."""
        return isinstance(self.proj, GroupLinear)

    @property
    def chain(self) -> Chain:
        """Two maps, if attention leaves the basis of the group alone."""
        return Chain(self.qkv.mix, self.proj)

    def attention_map(self, x: Tensor, row: int, column: int) -> Tensor:
        r"""How much one pixel attends to every pixel, for features [B, C, G, H, W]: maps [B, H, W] that sum to 1.

        The weights `A(x, g; y, h)` of Eq. 10, without dropout, for x = (row, column): summed over h, averaged over g and over
        the heads. The map turns with the features: `map(T_g F, g x) = T_g map(F, x)`. For pictures: it stores the weights.
        """
        check_features(x, self.channels, self.group)
        near = self._neighbours(row, column, *x.shape[-2:]).to(x.device)  # [H, W]
        q, k, _ = self.qkv(x)
        query = q[..., row, column].unflatten(1, (self.num_heads, -1))  # [B, heads, D, G]
        keys = (reduce_map(k, self.kv_reduction).flatten(-2) if self.neighbourhood == "global" else k[..., near]).unflatten(
            1, (self.num_heads, -1)
        )  # [B, heads, D, G, P]
        dim, order, positions = keys.shape[2:]
        if self.attention == "joint":
            scores = torch.einsum("bndg,bndhs->bnghs", query, keys) / math.sqrt(dim)
            weights = scores.flatten(3).softmax(-1).unflatten(3, (order, positions)).sum(3)  # [B, heads, G, P]
        elif self.attention == "spatial":
            scores = torch.einsum("bndg,bndgs->bns", query, keys) / math.sqrt(dim * order)
            weights = scores.softmax(-1).unsqueeze(2)  # [B, heads, 1, P]
        else:
            scores = torch.einsum("bndg,bndgs->bngs", query, keys) / math.sqrt(dim)
            weights = scores.softmax(-1)  # [B, heads, G, P]
        found = weights.mean((1, 2))  # [B, P]
        if self.neighbourhood == "global":
            return spread_parts(found, self.kv_reduction, *near.shape)
        out = weights.new_zeros(len(x), *near.shape)
        out[:, near] = found
        return out

    def _neighbours(self, row: int, column: int, height: int, width: int) -> Tensor:
        """N(x) for x = (row, column): True at the pixels that it attends to, [H, W]."""
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"no pixel ({row}, {column}) in a map of {height} x {width}; rows and columns count from 0")
        rows, columns = torch.arange(height), torch.arange(width)
        if self.neighbourhood == "global":
            return torch.ones(height, width, dtype=torch.bool)
        if self.neighbourhood == "local":
            reach = self.windows.window // 2
            near_rows, near_columns = (rows - row).abs() <= reach, (columns - column).abs() <= reach
        else:
            down, across = self.windows.tilings(height, width)
            near_rows = (rows + down.before) // down.side == (row + down.before) // down.side
            near_columns = (columns + across.before) // across.side == (column + across.before) // across.side
        return near_rows[:, None] & near_columns

    def extra_repr(self) -> str:
        text = f"{self.group}, {self.channels} fields, {self.num_heads} heads, {self.attention}, {self.neighbourhood}"
        if self.neighbourhood == "global" and self.kv_reduction == 1:
            return f"{text}, {self.chain}" if self.attention == "spatial" else text
        if self.neighbourhood == "global":
            return f"{text}, keys and values of {self.kv_reduction} x {self.kv_reduction} pixels"
        return f"{text} {self.windows.window}{' shifted' if self.windows.shifted else ''}"


def check_heads(channels: int, num_heads: int) -> int:
    if not isinstance(num_heads, int) or num_heads < 1 or channels % num_heads:
        divisors = [str(n) for n in range(1, channels + 1) if channels % n == 0]
        raise ValueError(f"num_heads={num_heads!r} does not divide the {channels} fields; choose {', '.join(divisors)}")
    return num_heads
