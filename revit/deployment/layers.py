"""The plain counterparts of our layers: weights that are used as they are, nothing that only training needs.

Each is made from the layer that it stands for and computes the same maps [B, C, G, H, W]. None has a mode: training and eval
are the same.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from revit.exactness import Sampling, StrideGuard
from revit.groups import Group
from revit.nn import fourier
from revit.nn.attentive import RESPONSES_AT_ONCE, AttentiveConv, attentive_fields
from revit.nn.block import TransformerBlock
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv
from revit.nn.local_attention import attend_local, multiply_adds
from revit.nn.relative_attention import RelativeSelfAttention, attend_unfolded, turned_offsets

Convolution = LiftingConv | GroupConv | GroupLinear


def is_exporting() -> bool:
    """Whether the operations are being written down for another program, which may not have our own ones."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


class PlainConv(nn.Module):
    """An equivariant convolution as one `nn.Conv2d` of the expanded filters, [O*G, I(*G), K, K].

    [B, C_in, (G,) H, W] -> [B, C_out, G, H', W']. Sizes at which the layer cannot be exact are refused as before.
    """

    def __init__(self, layer: Convolution) -> None:
        super().__init__()
        self.group: Group = layer.group
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.guard = layer_guard(layer)
        s, groups = self.guard.sampling, getattr(layer, "groups", 1)
        weight = layer.filters().detach().clone()
        self.conv = nn.utils.skip_init(
            nn.Conv2d, weight.shape[1] * groups, weight.shape[0], s.kernel_size, s.stride, s.padding, s.dilation, groups,
            bias=layer.bias is not None,
        )  # fmt: skip
        self.conv.weight = nn.Parameter(weight)
        if layer.bias is not None:
            self.conv.bias = nn.Parameter(layer.bias.detach().repeat_interleave(self.group.order))

    @property
    def weight(self) -> Tensor:
        return self.conv.weight

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the layer cannot be exact (or warns, if not strict)."""
        return self.guard.output_size(height, width)

    def forward(self, x: Tensor) -> Tensor:
        self.output_size(*x.shape[-2:])
        out = self.conv(x.flatten(1, 2) if x.ndim == 5 else x)
        return out.unflatten(1, (self.out_channels, self.group.order))  # [B, C_out, G, H', W']

    def extra_repr(self) -> str:
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields"


class PlainFourier(nn.Module):
    """A group convolution in the Fourier basis of `revit.nn.fourier`, its block matrices made once.

    [B, C_in, G, H, W] -> [B, C_out, G, H', W'].
    """

    def __init__(self, layer: GroupConv | GroupLinear) -> None:
        super().__init__()
        self.group: Group = layer.group
        self.in_channels, self.out_channels, self.work = layer.in_channels, layer.out_channels, layer.algorithm.work
        self.guard = layer_guard(layer)
        is_linear = isinstance(layer, GroupLinear)
        self.sight = None if is_linear else fourier.Sight(layer.filters.filters, self.guard.sampling)
        self.blocks = nn.ParameterList(nn.Parameter(block.detach().clone()) for block in layer.filters.blocks())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().view(-1, 1, 1, 1).clone())

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the layer cannot be exact (or warns, if not strict)."""
        return self.guard.output_size(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image."""
        return self.work.fourier_products * height * width

    def forward(self, x: Tensor) -> Tensor:
        self.output_size(*x.shape[-2:])
        out = fourier.transform(x, list(self.blocks), self.group, self.sight)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields"


class FieldAffine(nn.Module):
    """`scale[c] x[c] + shift[c]`, for x [B, C, ...]: a batch norm that no convolution could take in."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(scale), nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        return torch.addcmul(self.shift.view(shape), x, self.scale.view(shape))

    def extra_repr(self) -> str:
        return f"{len(self.scale)} fields"


class PlainBlock(nn.Module):
    """`x = x + attn(norm(x))`, then `x = x + mlp(norm(x))`: a transformer block whose scales are in its weights."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainAttentiveConv(nn.Module):
    """`AttentiveConv` with its banks of filters made once."""

    def __init__(self, layer: AttentiveConv) -> None:
        super().__init__()
        conv = layer.conv
        self.group: Group = conv.group
        self.in_channels, self.out_channels, self.elements = layer.in_channels, layer.out_channels, layer.elements
        self.guard = layer_guard(conv)
        order, fields_in, fields_out = self.group.order, self.in_channels, self.out_channels
        banks = (
            conv.filters().unflatten(1, (fields_in, self.elements)).unflatten(0, (fields_out, order)),
            layer.reduce().view(fields_out, layer.hidden, order, fields_in, self.elements),
            layer.expand().view(fields_out, fields_in, order, layer.hidden, self.elements),
            layer.spatial().unflatten(1, (2, self.elements)).unflatten(0, (fields_out, order)),
        )
        self.filters, self.reduce, self.expand, self.spatial = (nn.Parameter(bank.detach().clone()) for bank in banks)
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach().view(-1, 1, 1, 1).clone())

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the convolution cannot be exact (or warns, if it is not strict)."""
        return self.guard.output_size(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image: both statistics go through `reduce` and `expand`."""
        filters = self.filters.numel() + self.spatial.numel()
        return 2 * (self.reduce.numel() + self.expand.numel()) + filters * height * width

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.output_size(*x.shape[-2:])
        maps = x.flatten(1, 2) if x.ndim == 5 else x
        at_once = self.out_channels
        if not is_exporting():  # the number of steps cannot depend on the batch in a file
            a_field = len(x) * self.in_channels * self.elements * self.group.order * height * width
            at_once = max(1, RESPONSES_AT_ONCE // max(1, a_field))
        parts = zip(*(bank.split(at_once) for bank in (self.filters, self.reduce, self.expand, self.spatial)), strict=True)
        run = partial(attentive_fields, sampling=self.guard.sampling)
        out = torch.cat([run(maps, *part) for part in parts], dim=1)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields"


class PlainRelativeAttention(nn.Module):
    """`RelativeSelfAttention` to K x K pixels with its encodings made once: they depend on the offsets alone.

    The distinct encodings [U, D] are kept, and which one an offset has at an element, [K*K, G]: what `attend_local` takes.
    """

    def __init__(self, layer: RelativeSelfAttention) -> None:
        super().__init__()
        assert layer.patch_size is not None
        self.num_heads, self.mid_channels, self.patch_size = layer.num_heads, layer.mid_channels, layer.patch_size
        self.group: Group = layer.group
        self.lifting, self.scale = layer.lifting, 1 / math.sqrt(layer.in_channels)
        self.qkv, self.proj = layer.qkv, layer.proj
        weight = layer.qkv.weight
        points, encoding_of = turned_offsets(layer.group, self.patch_size, self.patch_size)
        exact = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            encodings = layer._encode(points.to(weight) / max(1, self.patch_size // 2)).to(exact)
            elements = layer._relative_elements(encodings)
        self.encodings, self.elements = nn.Parameter(encodings), nn.Parameter(elements)
        self.register_buffer("encoding_of", encoding_of.to(weight.device))
        self.encoding_of: Tensor

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def attention_multiply_adds(self, height: int, width: int) -> int:
        """Products of queries with keys and encodings, and of weights with values, on a map of this size, of one image."""
        offsets, outputs = self.encoding_of.shape
        one = multiply_adds(height * width, len(self.elements), outputs, self.mid_channels, offsets, len(self.encodings))
        return self.num_heads * one

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(2) if self.lifting else x
        parts = self.qkv(x).to(self.encodings.dtype).unflatten(1, (3, self.num_heads, self.mid_channels))
        q, k, v = (parts[:, i] for i in range(3))  # [B, heads, D, G, H, W] each
        attend = attend_unfolded if is_exporting() else attend_local
        with torch.autocast(x.device.type, enabled=False):
            out = attend(q, k, v, self.encodings, self.elements, self.encoding_of, self.patch_size, self.scale)
        return self.proj(out.flatten(1, 2).to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.group}, {self.num_heads} heads, {self.patch_size} x {self.patch_size}"


def layer_guard(layer: Convolution) -> StrideGuard:
    return StrideGuard(layer.group, Sampling(1), strict=True) if isinstance(layer, GroupLinear) else layer.guard
