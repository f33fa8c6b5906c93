"""All-CNN-C (Springenberg et al. 2015) on a group, the G-CNN baseline for CIFAR-10 of Cohen and Welling (2016)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from revit.groups import Group
from revit.models.gcnn import GCNN, ConvHead, ConvLayer, HalvingConv, widths
from revit.models.registry import register_model
from revit.nn.convolution import GroupConv, LiftingConv
from revit.nn.dropout import make_dropout


def _all_cnn_c(
    *, group: Group | str = "p4", in_chans: int = 3, num_classes: int = 10, dims: int | Sequence[int] = 48,
    filters: str = "auto", norm: str = "batch", drop_rate: float = 0.0, elementwise_dropout: bool = False,
    odd_strides: bool = False, group_pool: str = "max", strict: bool = True,
) -> GCNN:  # fmt: skip
    """Seven 3 x 3 convolutions with padding, the third and the sixth with stride 2 and dropout, then two 1 x 1 (the last is the
    head's). `dims` are the fields of the first three layers and of the others; one number n means (n, 2n)."""
    group = Group.parse(group)
    narrow, wide = widths((dims, 2 * dims) if isinstance(dims, int) else dims, 2)
    options: dict[str, Any] = {"bias": False, "filters": filters}
    layers = [ConvLayer(LiftingConv(group, in_chans, narrow, 3, padding=1, **options), norm)]
    for i, (before, after) in enumerate(pairwise([narrow] * 3 + [wide] * 5), start=2):
        conv: GroupConv | HalvingConv = GroupConv(group, before, after, 1 if i == 8 else 3, padding=int(i != 8), **options)
        dropout: nn.Module = nn.Identity()
        if i in (3, 6):
            conv = HalvingConv(group, before, after, odd=odd_strides, strict=strict, **options)
            dropout = make_dropout(drop_rate, elementwise=elementwise_dropout)
        layers.append(ConvLayer(conv, norm, dropout=dropout))
    make_head = partial(ConvHead, group, wide, norm=norm, group_pool=group_pool)
    return GCNN(group, layers, make_head, in_chans=in_chans, num_classes=num_classes, dims=(narrow, wide), min_input_size=4)


@register_model
def gcnn_cifar(**overrides: Any) -> GCNN:
    """All-CNN-C for 32 pixels, exact: 1,370,372 parameters (p4, 48 fields), 1,370,996 (z2, 96), 1,375,048 (z2m, 68)."""
    return _all_cnn_c(**overrides)


@register_model
def gcnn_cifar_paper(**overrides: Any) -> GCNN:
    """All-CNN-C as published, the same parameters: odd strided kernels, not exact at 32 pixels; mean over the group."""
    return _all_cnn_c(**{"odd_strides": True, "strict": False, "group_pool": "mean", **overrides})
