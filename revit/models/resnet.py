"""RE-ResNet: a residual network (He et al. 2016) on a group, the convolutional baseline for ImageNet.

    image [B, C, H, W] --stem--> [B, C0, G, H/4, W/4] --four stages of residual blocks--> [B, C, G, H/32, W/32] --head--> logits

The paper's p4m network of 11M parameters is not published; its name is that of a network on p8 by Han et al. (2021), which has
the layout of ResNet-50 and a classifier that reads each element by itself, so that its logits are not invariant. Ours has the
same layout and pools over the group. Its widths, from 15 fields on, come nearest to 11M; ResNet-34 with 16 fields (10.77M) and
ResNet-18 with 22 (10.73M) are next. It is a `GCNN` whose layers are the stem and the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from revit.exactness import Sampling, StrideGuard, next_multiple
from revit.groups import Group
from revit.models.gcnn import GCNN, HalvingConv, HalvingPool, norm_and_relu
from revit.models.registry import register_model
from revit.models.revit import per_stage, positive
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv
from revit.nn.normalization import make_norm
from revit.nn.pooling import GroupPool, SpatialPool, fit_to_stride

EXPANSION = 4  # a bottleneck has that many times the fields of its 3 x 3 convolution


class OddPool(nn.Module):
    """Maximum over 3 x 3 pixels with stride 2 and padding 1, as ResNets have it: exact at odd sizes only."""

    def __init__(self, group: Group, *, strict: bool) -> None:
        super().__init__()
        self.guard = StrideGuard(group, Sampling(3, 2, 1), strict=strict)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.guard.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        self.output_size(*x.shape[-2:])
        return F.max_pool3d(x, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))


class Stem(nn.Module):
    """Lifts an image: a 3 x 3 convolution (stride 1), or a large one that halves it (2), or that and a max-pool (4).

    The large one is 8 x 8 after `fit_to_stride` and the pool 2 x 2, exact at every size. With `odd` they are the usual 7 x 7
    and 3 x 3, exact at odd sizes only.
    """

    folds = (("conv", "norm"),)

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        norm: str,
        odd: bool,
        filters: str,
        strict: bool,
    ) -> None:
        super().__init__()
        if stride not in (1, 2, 4):
            raise ValueError(f"the stem of a ResNet has stride 1, 2 or 4, got {stride!r}")
        step = min(stride, 2)
        self.stride, self.out_channels, self.fit = stride, out_channels, 1 if odd else step
        kernel_size, padding = (3, 1) if stride == 1 else (7, 3) if odd else (8, 3)
        self.conv = LiftingConv(
            group, in_channels, out_channels, kernel_size,
            stride=step, padding=padding, bias=False, filters=filters, strict=strict,
        )  # fmt: skip
        self.norm = norm_and_relu(norm, out_channels)
        self.pool: Any = None
        if stride == 4:
            self.pool = OddPool(group, strict=strict) if odd else HalvingPool("max")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.conv.output_size(next_multiple(height, self.fit), next_multiple(width, self.fit))
        return size if self.pool is None else self.pool.output_size(*size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(fit_to_stride(x, self.fit)))
        return x if self.pool is None else self.pool(x)


class ResidualBlock(nn.Module):
    """`relu(shortcut(x) + convolutions(x))`: [B, C_in, G, H, W] -> [B, C, G, H/stride, W/stride], rounded up.

    Two 3 x 3 convolutions with `width` fields; or, as a `bottleneck`, one between two 1 x 1, with C = 4 `width`. The (first)
    3 x 3 has the stride. The shortcut is the identity where it can be, else a 1 x 1 convolution: where the stride is 2, of the
    mean over 2 x 2 pixels, or with `odd` of every second pixel, which is exact at odd sizes only.
    """

    folds = (("conv", "norm"),)

    def __init__(
        self, group: Group, in_channels: int, width: int, *, stride: int, bottleneck: bool, norm: str, odd: bool, filters: str,
        strict: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stride, self.out_channels = stride, width * EXPANSION if bottleneck else width
        before = width if bottleneck else in_channels
        options: dict[str, Any] = {"bias": False, "filters": filters}
        self.conv: GroupConv | HalvingConv
        if stride == 2:
            self.conv = HalvingConv(group, before, width, odd=odd, strict=strict, **options)
        else:
            self.conv = GroupConv(group, before, width, 3, padding=1, **options)
        self.reduce: nn.Module = nn.Identity()
        if bottleneck:
            self.reduce = nn.Sequential(GroupLinear(group, in_channels, width, bias=False), norm_and_relu(norm, width))
            last: nn.Module = GroupLinear(group, width, self.out_channels, bias=False)
        else:
            last = GroupConv(group, width, width, 3, padding=1, **options)
        self.norm = norm_and_relu(norm, width)
        self.last = nn.Sequential(last, make_norm(norm, self.out_channels))
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2 and odd:
            conv = GroupConv(group, in_channels, self.out_channels, 1, stride=2, strict=strict, **options)
            self.shortcut = nn.Sequential(conv, make_norm(norm, self.out_channels))
        elif stride == 2 or in_channels != self.out_channels:
            pool = HalvingPool("mean") if stride == 2 else nn.Identity()
            conv1x1 = GroupLinear(group, in_channels, self.out_channels, bias=False)
            self.shortcut = nn.Sequential(pool, conv1x1, make_norm(norm, self.out_channels))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.conv.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.last(self.norm(self.conv(self.reduce(x)))))


class ResidualStage(nn.Module):
    """Residual blocks, the first of which may halve the map."""

    def __init__(self, blocks: list[ResidualBlock]) -> None:
        super().__init__()
        self.blocks: Any = nn.Sequential(*blocks)
        self.stride, self.out_channels = blocks[0].stride, blocks[-1].out_channels

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.blocks[0].output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class LinearHead(nn.Module):
    """Maximum over the group, mean over space, one linear layer: invariant logits [B, classes].

    `num_classes=0` leaves the pooled features [B, C].
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 0:
            raise ValueError(f"a head needs num_classes >= 0, got {num_classes}")
        self.num_classes, self.group_pool, self.spatial_pool = num_classes, GroupPool("max"), SpatialPool()
        self.fc: nn.Module = nn.Linear(channels, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        x = self.spatial_pool(self.group_pool(x))  # [B, C]
        return x if pre_logits else self.fc(x)


def _re_resnet(
    *, group: Group | str = "p4m", in_chans: int = 3, num_classes: int = 1000, dims: int | Sequence[int] = 15,
    depths: int | Sequence[int] = (3, 4, 6, 3), stride: int = 4, bottleneck: bool = True, filters: str = "auto",
    norm: str = "batch", odd_strides: bool = False, strict: bool = True,
) -> GCNN:  # fmt: skip
    """`dims` are the fields of the 3 x 3 convolutions in each stage; one number n means n, 2n, 4n, ... `depths` are the blocks
    in each; every stage but the first halves the map. `stride` is that of the stem."""
    group = Group.parse(group)
    if isinstance(dims, int):
        dims = [dims * 2**i for i in range(len(positive("depths", depths)))]
    dims, depths = per_stage(dims=dims, depths=depths)
    scheme: dict[str, Any] = {"norm": norm, "odd": odd_strides, "filters": filters, "strict": strict}
    layers: list[Any] = [Stem(group, in_chans, dims[0], stride=stride, **scheme)]
    for i, (width, depth) in enumerate(zip(dims, depths, strict=True)):
        blocks: list[ResidualBlock] = []
        for j in range(depth):
            before = blocks[-1] if blocks else layers[-1]
            step = 2 if i > 0 and j == 0 else 1
            blocks.append(ResidualBlock(group, before.out_channels, width, stride=step, bottleneck=bottleneck, **scheme))
        layers.append(ResidualStage(blocks))
    make_head = partial(LinearHead, layers[-1].out_channels)
    return GCNN(group, layers, make_head, in_chans=in_chans, num_classes=num_classes, dims=dims, min_input_size=2 * stride)


@register_model
def re_resnet(**overrides: Any) -> GCNN:
    """RE-ResNet for ImageNet, exact, in the layout of ResNet-50: 10,799,530 parameters (p4m, 15 fields)."""
    return _re_resnet(**overrides)


@register_model
def re_resnet_paper(**overrides: Any) -> GCNN:
    """RE-ResNet with the strides of the usual ResNet, not exact at even sizes: 10,798,855 parameters (p4m, 15 fields)."""
    return _re_resnet(**{"odd_strides": True, "strict": False, **overrides})


@register_model
def re_resnet_small(**overrides: Any) -> GCNN:
    """RE-ResNet for 28 to 96 pixels, exact, in the layout of ResNet-18: 1,069,617 parameters (p4m, 7 fields)."""
    sizes = {"dims": 7, "depths": (2, 2, 2, 2), "stride": 1, "bottleneck": False, "num_classes": 10}
    return _re_resnet(**{**sizes, **overrides})
