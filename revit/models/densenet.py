"""The G-CNN baseline for PatchCamelyon: a small DenseNet (Veeling et al. 2018, as Romero et al. 2020 have it).

Every dense block is one 3 x 3 group convolution whose output joins its input; a transition mixes the fields and halves the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from revit.groups import Group
from revit.models.gcnn import GCNN, ConvHead, ConvLayer, HalvingPool, norm_and_relu, widths
from revit.models.registry import register_model
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv


class DenseBlock(nn.Module):
    """Norm, ReLU, 3 x 3 convolution to `growth` new fields, in front of the old ones without their border of one pixel."""

    stride = 1

    def __init__(self, group: Group, in_channels: int, growth: int, *, norm: str, filters: str) -> None:
        super().__init__()
        self.norm = norm_and_relu(norm, in_channels)
        self.conv = GroupConv(group, in_channels, growth, 3, bias=False, filters=filters)
        self.out_channels = in_channels + growth

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.conv.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.conv(self.norm(x)), x[..., 1:-1, 1:-1]), dim=1)


class Transition(nn.Module):
    """Norm, ReLU, 1 x 1 convolution, mean over 2 x 2 pixels."""

    stride = 2

    def __init__(self, group: Group, channels: int, *, norm: str) -> None:
        super().__init__()
        self.norm = norm_and_relu(norm, channels)
        self.conv, self.pool = GroupLinear(group, channels, channels, bias=False), HalvingPool("mean")
        self.out_channels = channels

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.pool.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(self.norm(x)))


class NormAct(nn.Module):
    """The norm and ReLU that end the last dense block."""

    stride = 1

    def __init__(self, channels: int, *, norm: str) -> None:
        super().__init__()
        self.norm, self.out_channels = norm_and_relu(norm, channels), channels

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@register_model
def gcnn_pcam(
    *, group: Group | str = "p4", in_chans: int = 3, num_classes: int = 2, dims: int | Sequence[int] = 13,
    filters: str = "auto", norm: str = "batch",
) -> GCNN:  # fmt: skip
    """DenseNet of five blocks for 96 pixels: 130,598 parameters (z2, growth 26), 129,649 (p4, 13), 124,209 (p4m, 9).

    `dims` is the growth: the fields of the lifting layer and the new ones of each block. The published batch norms have an
    epsilon of 2e-5, ours of 1e-5.
    """
    group = Group.parse(group)
    (growth,) = widths(dims, 1)
    layers: list[Any] = [ConvLayer(LiftingConv(group, in_chans, growth, 3, bias=False, filters=filters), None)]
    for i in range(5):
        if i > 0:
            layers.append(Transition(group, layers[-1].out_channels, norm=norm))
        layers.append(DenseBlock(group, layers[-1].out_channels, growth, norm=norm, filters=filters))
    channels = layers[-1].out_channels
    layers.append(NormAct(channels, norm=norm))
    make_head = partial(ConvHead, group, channels)
    return GCNN(group, layers, make_head, in_chans=in_chans, num_classes=num_classes, dims=(growth,), min_input_size=65)
