"""CvT (Wu et al. 2021), the convolutional vision transformer: a baseline without positions and without symmetry.

    image [B, C, H, W] --embed, blocks--> [B, D1, H/4, W/4] --embed, blocks--> ... --class token or mean--> logits [B, classes]

Every stage embeds overlapping pieces of the map by a strided convolution, and its blocks make queries, keys and values by
depthwise convolutions. Those tell the positions, so that no encoding is needed; but their filters are free, and turning the
image changes everything all the same. Scores are divided by the square root of a head's width, as in the equations; the
published code divides by that of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.exactness import Sampling
from revit.groups import Group
from revit.models.input_size import check_images
from revit.models.registry import register_model
from revit.models.revit import per_stage, positive
from revit.models.tokens import Block, TokenTransformer, as_map, check_heads, check_plain, classifier, start_small
from revit.nn.dropout import check_rate


class ConvEmbed(nn.Module):
    """Embeds overlapping pieces of a map: a convolution and layer norm, [B, C, H, W] -> tokens [B, H'*W', D].

    Kernel 2*stride - 1 and padding stride/2 are the published 7 x 7, stride 4, padding 2 and 3 x 3, stride 2, padding 1.
    """

    def __init__(self, in_channels: int, dim: int, stride: int) -> None:
        super().__init__()
        self.sampling = Sampling(2 * stride - 1, stride, stride // 2)
        self.proj = nn.Conv2d(in_channels, dim, self.sampling.kernel_size, stride=stride, padding=self.sampling.padding)
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.sampling.output_size(height), self.sampling.output_size(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class DepthwiseConv(nn.Sequential):
    """3 x 3 convolution of each channel by itself and batch norm: [B, D, H, W] -> [B, D, ceil(H/stride), ceil(W/stride)]."""

    def __init__(self, dim: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False), nn.BatchNorm2d(dim))


class QueryConv(DepthwiseConv):
    """The convolution of the queries: its output has the height and width that the cost of attention depends on."""

    def __init__(self, dim: int, *, kv_stride: int, class_token: bool) -> None:
        super().__init__(dim)
        self.dim, self.keys, self.class_token = dim, Sampling(3, kv_stride, 1), class_token

    def attention_multiply_adds(self, height: int, width: int) -> int:
        """Products of queries with keys and of weights with values for one image."""
        keys = self.keys.output_size(height) * self.keys.output_size(width)
        return 2 * (height * width + self.class_token) * (keys + self.class_token) * self.dim


class ConvAttention(nn.Module):
    """Multi-head self-attention over tokens [B, (1 +) H*W, D] with queries, keys and values from convolutions of their map.

    Each is a depthwise convolution, batch norm and a linear layer. Keys and values have stride `kv_stride`, so there are fewer
    of them. The class token, in front, has the linear layers alone.
    """

    def __init__(
        self, dim: int, num_heads: int, *, kv_stride: int, class_token: bool, dropout: float, attn_dropout: float
    ) -> None:
        super().__init__()
        self.num_heads, self.attn_dropout = num_heads, attn_dropout
        self.conv_q = QueryConv(dim, kv_stride=kv_stride, class_token=class_token)
        self.conv_k, self.conv_v = DepthwiseConv(dim, kv_stride), DepthwiseConv(dim, kv_stride)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.proj, self.drop = nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        token, grid = x[:, : -height * width], as_map(x, (height, width))  # [B, 1 or 0, D], [B, D, H, W]

        def project(conv: nn.Module, linear: nn.Module) -> Tensor:
            tokens = torch.cat((token, conv(grid).flatten(2).transpose(1, 2)), dim=1)
            return linear(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, N, D/heads]

        q, k, v = project(self.conv_q, self.q), project(self.conv_k, self.k), project(self.conv_v, self.v)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_dropout if self.training else 0.0)
        return self.drop(self.proj(out.transpose(1, 2).flatten(2)))  # [B, (1 +) H*W, D]


class Stage(nn.Module):
    """An embedding, then blocks."""

    embed: ConvEmbed
    blocks: nn.ModuleList

    def __init__(self, embed: ConvEmbed, blocks: list[Block]) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)


class CvT(TokenTransformer):
    """Convolutional vision transformer: images [B, in_chans, H, W] -> logits [B, num_classes], equivariant to nothing.

    `dims`, `depths` and `num_heads` have one entry for each stage; as they stand they are CvT-13 (19,997,480 parameters).
    `stride` is that of the first embedding, all others halve the map. `kv_stride` leaves that much fewer rows and columns of
    keys and values. `pool` is what the classifier reads: a class `token`, which the last stage adds, or the `mean` over the
    positions. `group` is there because every model takes one; it can only be z2.
    """

    kind = "a CvT"

    def __init__(
        self,
        *,
        group: Group | str = "z2",
        in_chans: int = 3,
        num_classes: int = 1000,
        dims: int | Sequence[int] = (64, 192, 384),
        depths: int | Sequence[int] = (1, 2, 10),
        num_heads: int | Sequence[int] = (1, 3, 6),
        stride: int = 4,
        kv_stride: int = 2,
        mlp_ratio: float = 4,
        pool: str = "token",
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.group = check_plain(self.kind, group, pool)
        dims, depths, heads = per_stage(dims=dims, depths=depths, num_heads=num_heads)
        for name, value in (("in_chans", in_chans), ("stride", stride), ("kv_stride", kv_stride)):
            if len(positive(name, value)) > 1:
                raise ValueError(f"{name} of a CvT is one number, got {value!r}")
        self.in_chans, self.dims, self.num_heads, self.num_features, self.pool = in_chans, dims, heads, dims[-1], pool
        self.min_input_size = stride

        drop: dict[str, Any] = {"dropout": check_rate("drop_rate", drop_rate)}
        attn_dropout = check_rate("attn_drop_rate", attn_drop_rate)
        rates = iter([drop_path_rate * i / max(1, sum(depths) - 1) for i in range(sum(depths))])
        self.stages: Any = nn.ModuleList()  # of Stage
        for i, (before, dim, depth, head_count) in enumerate(zip((in_chans, *dims), dims, depths, heads, strict=False)):
            check_heads(dim, head_count)
            token = pool == "token" and i == len(dims) - 1
            attention: dict[str, Any] = {"kv_stride": kv_stride, "class_token": token, "attn_dropout": attn_dropout}
            blocks = []
            for _ in range(depth):
                attn = ConvAttention(dim, head_count, **attention, **drop)
                blocks.append(Block(dim, attn, mlp_ratio=mlp_ratio, drop_path=next(rates), **drop))
            self.stages.append(Stage(ConvEmbed(before, dim, stride if i == 0 else 2), blocks))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dims[-1])) if pool == "token" else None
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = classifier(dims[-1], num_classes)
        start_small(self, self.cls_token)

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> tokens [B, (1 +) H'*W', D], the class token first. The maps on the way are put into `features` by name, if
        it is given, as [B, D, H', W'] without the class token: `lift` (the first embedding), `stages.0.blocks.0`, ...,
        `pre_class`."""
        check_images(x, self.in_chans, self.min_input_size)
        size = tuple(x.shape[-2:])

        def keep(name: str, tokens: Tensor) -> Tensor:
            if features is not None:
                features[name] = as_map(tokens, size)
            return tokens

        for i, stage in enumerate(self.stages):
            if i > 0:
                x = as_map(x, size)
            size, x = stage.embed.output_size(*size), stage.embed(x)
            if i == 0:
                keep("lift", x)
            if i == len(self.stages) - 1 and self.cls_token is not None:
                x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
            for j, block in enumerate(stage.blocks):
                x = keep(f"stages.{i}.blocks.{j}", block(x, *size))
        return keep("pre_class", self.norm(x))

    def check_input_size(self, height: int, width: int | None = None) -> dict[str, tuple[int, int]]:
        """The size of the map after each embedding; raises `ValueError` below the minimum size."""
        size = height, height if width is None else width
        least = self.min_input_size
        if min(size) < least:
            raise ValueError(f"images of {size[0]} x {size[1]} are below the minimum of {least} x {least} of this model")
        sizes: dict[str, tuple[int, int]] = {}
        for i, stage in enumerate(self.stages):
            sizes[f"stages.{i}.embed"] = size = stage.embed.output_size(*size)
        return sizes


@register_model
def cvt_tiny(**overrides: Any) -> CvT:
    """A CvT of the size of the paper's smallest models: 44,306 parameters for 28 x 28 x 1, 10 classes."""
    return CvT(**{"dims": (20, 34), "depths": (1, 2), "num_heads": (1, 2), "num_classes": 10, **overrides})
