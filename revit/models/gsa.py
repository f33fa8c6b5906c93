"""G-SA networks of Romero and Cordonnier (2021), the paper's opponent: group self-attention that sees relative positions.

    image [B, C, H, W] --lifting attention--> [B, C0, G, H, W] --blocks, pooling--> [B, C, G, H', W'] --head--> logits

Widths, blocks, crops and pooling are those of the published code (`dwromero/g_selfatt`) for each of its three datasets, and so
are the numbers of parameters. Other than there, the encoding of elements is that of the key's element relative to the query's
alone, and pooling is exact at odd sizes too (the published model for PatchCamelyon pools 7 x 7 pixels to 3 x 3, which is not
symmetric).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from revit.groups import Group
from revit.models.gcnn import GCNN, HalvingPool, widths
from revit.models.registry import register_model
from revit.nn.convolution import Pointwise
from revit.nn.dropout import check_rate, make_dropout
from revit.nn.relative_attention import RelativeSelfAttention

HEADS = 9


class AfterLayer(nn.Module):
    """What may follow a layer: a norm and Swish, 2 x 2 max-pooling, dropout."""

    def __init__(self, channels: int, *, norm: bool, halve: bool, dropout: float) -> None:
        super().__init__()
        self.norm = norm_and_swish(channels) if norm else nn.Identity()
        self.pool = HalvingPool("max") if halve else None
        self.drop = make_dropout(dropout if halve else 0.0)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return (height, width) if self.pool is None else self.pool.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.pool is None else self.drop(self.pool(x))


class LiftingAttention(nn.Module):
    """Images [B, C_in, H, W] -> [B, C, G, H', W']: attention to the pixels around a pixel as each element sees them."""

    def __init__(
        self, group: Group, in_channels: int, out_channels: int, *, num_heads: int, patch_size: int | None, halve: bool,
        input_dropout: float, dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.drop = nn.Dropout(check_rate("input_drop_rate", input_dropout))
        self.attn = RelativeSelfAttention(
            group, in_channels, out_channels, num_heads=num_heads, mid_channels=out_channels // 2, patch_size=patch_size,
            lifting=True,
        )  # fmt: skip
        self.after = AfterLayer(out_channels, norm=True, halve=halve, dropout=dropout)
        self.out_channels, self.stride = out_channels, 2 if halve else 1

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.after.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.attn(self.drop(x)))


class AttentionBlock(nn.Module):
    """`x = crop(attention(x) + shortcut(x))`, then `x = x + mlp(x)`: [B, C_in, G, H, W] -> [B, C_out, G, H', W'].

    Attention stands between norms and Swish, the MLP goes through half of the fields, `crop` cuts so many pixels at each side.
    """

    def __init__(
        self, group: Group, in_channels: int, out_channels: int, *, num_heads: int, patch_size: int | None, crop: int,
        halve: bool, norm_after: bool, dropout: float, pool_dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1, self.norm2 = norm_and_swish(in_channels), norm_and_swish(out_channels)
        half = out_channels // 2
        self.attn = RelativeSelfAttention(
            group, in_channels, out_channels, num_heads=num_heads, mid_channels=half, patch_size=patch_size
        )
        self.drop = make_dropout(dropout)
        self.shortcut = nn.Identity() if in_channels == out_channels else Pointwise(in_channels, out_channels)
        self.mlp = nn.Sequential(
            Pointwise(out_channels, half), *norm_and_swish(half), Pointwise(half, out_channels), norm(out_channels)
        )
        self.after = AfterLayer(out_channels, norm=norm_after, halve=halve, dropout=pool_dropout)
        self.crop, self.out_channels, self.stride = crop, out_channels, 2 if halve else 1

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.after.output_size(height - 2 * self.crop, width - 2 * self.crop)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.norm2(self.attn(self.norm1(x))))
        x = out + self.shortcut(x)
        if self.crop:
            x = x[..., self.crop : -self.crop, self.crop : -self.crop]
        return self.after(x + self.mlp(x))


class SumHead(nn.Module):
    """Classes as fields, then the sum over space and the maximum over the group: invariant logits [B, classes].

    `num_classes=0` leaves the features, pooled in the same way.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 0:
            raise ValueError(f"a head needs num_classes >= 0, got {num_classes}")
        self.num_classes = num_classes
        self.fc: nn.Module = nn.Identity()
        if num_classes:
            self.fc = classifier = Pointwise(channels, num_classes, bias=False)
            nn.init.normal_(classifier.weight, std=0.01)  # small, since all pixels are summed

    def forward(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        x = x if pre_logits else self.fc(x)
        return x.sum(dim=(-2, -1)).amax(dim=2)


def _gsa(
    blocks: Sequence[int], growth: Sequence[int], crops: Sequence[int], *, min_input_size: int, norm_between: bool,
    pool_last: bool, group: Group | str, in_chans: int, num_classes: int, dims: int | Sequence[int], num_heads: int = HEADS,
    neighbourhood: str = "local", window_size: int = 5, drop_rate: float = 0.0, pool_drop_rate: float = 0.0,
    input_drop_rate: float = 0.0,
) -> GCNN:  # fmt: skip
    """A lifting layer and stages of `blocks` layers; each stage multiplies the fields by its `growth` and is followed by
    pooling, the last one only with `pool_last`. `crops` has an entry for each block. A pixel attends to the `window_size` x
    `window_size` pixels around it (`local`) or to all (`global`)."""
    group = Group.parse(group)
    if neighbourhood not in ("local", "global"):
        raise ValueError(f"unknown neighbourhood {neighbourhood!r} for relative positions; choose local, global")
    if window_size < 1 or window_size % 2 == 0:
        raise ValueError(f"window_size must be odd and >= 1 for local attention, got {window_size}")
    (width,) = widths(dims, 1)
    if width % 2 or width < 6:
        raise ValueError(f"attention has half of the fields as keys, of three parts: dims must be even and >= 6, got {width}")
    shared: dict[str, Any] = {"num_heads": num_heads, "patch_size": window_size if neighbourhood == "local" else None}
    last = len(blocks) - 1
    halve_lift = blocks[0] == 0
    layers: list[Any] = [
        LiftingAttention(
            group, in_chans, width, halve=halve_lift, input_dropout=input_drop_rate, dropout=pool_drop_rate, **shared
        )
    ]
    cuts = iter(crops)
    for stage, (count, times) in enumerate(zip(blocks, accumulate(growth, int.__mul__), strict=True)):
        for i in range(count):
            ends = i == count - 1 and (stage < last or pool_last)
            layers.append(
                AttentionBlock(
                    group, layers[-1].out_channels, width * times, crop=next(cuts), halve=ends, norm_after=norm_between,
                    dropout=drop_rate, pool_dropout=pool_drop_rate, **shared,
                )
            )  # fmt: skip
    make_head = partial(SumHead, layers[-1].out_channels)
    model = GCNN(
        group, layers, make_head, in_chans=in_chans, num_classes=num_classes, dims=(width,), min_input_size=min_input_size
    )
    model.num_heads = (2,)  # keys have half of the fields: widths come in steps of two
    _reset(model)
    return model


def _reset(model: GCNN) -> None:
    """Pointwise weights as published, normal with variance 2 / fan-in and no bias; but for the classifier."""
    for module in model.layers.modules():
        if isinstance(module, nn.Conv3d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@register_model
def gsa_rotmnist(
    *, group: Group | str = "p4", in_chans: int = 1, num_classes: int = 10, dims: int | Sequence[int] = 20, **options: Any
) -> GCNN:
    """G-SA for 28 pixels: 44,368 parameters (z2), 44,428 (p4), 44,508 (p8), 44,668 (p16)."""
    shape: dict[str, Any] = {"norm_between": False, "pool_last": False, "min_input_size": 22}
    named: dict[str, Any] = {"group": group, "in_chans": in_chans, "num_classes": num_classes, "dims": dims}
    return _gsa([2, 3], [1, 1], [2, 0, 2, 1, 1], **shape, **named, **options)


@register_model
def gsa_cifar(
    *, group: Group | str = "p4", in_chans: int = 3, num_classes: int = 10, dims: int | Sequence[int] = 96, **options: Any
) -> GCNN:
    """G-SA for CIFAR-10, 96 fields and then 192, with the published dropout: 3,002,128 parameters (p4)."""
    shape: dict[str, Any] = {"norm_between": True, "pool_last": False, "min_input_size": 4}
    named: dict[str, Any] = {"group": group, "in_chans": in_chans, "num_classes": num_classes, "dims": dims}
    dropout = {"pool_drop_rate": 0.3, "input_drop_rate": 0.2}
    return _gsa([2, 2, 2], [1, 2, 1], [0] * 6, **shape, **named, **{**dropout, **options})


@register_model
def gsa_pcam(
    *, group: Group | str = "p4", in_chans: int = 3, num_classes: int = 2, dims: int | Sequence[int] = 12, **options: Any
) -> GCNN:
    """G-SA for PatchCamelyon, 12 fields that double three times: 207,034 parameters (p4)."""
    shape: dict[str, Any] = {"norm_between": True, "pool_last": True, "min_input_size": 42}
    named: dict[str, Any] = {"group": group, "in_chans": in_chans, "num_classes": num_classes, "dims": dims}
    return _gsa([0, 1, 2, 1], [1, 2, 2, 2], [0, 2, 1, 1], **shape, **named, **options)


def norm(channels: int) -> nn.GroupNorm:
    """One mean and variance for a sample, over fields, elements and pixels; a scale and a shift for each field."""
    return nn.GroupNorm(1, channels)


def norm_and_swish(channels: int) -> nn.Sequential:
    return nn.Sequential(norm(channels), nn.SiLU())
