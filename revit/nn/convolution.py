r"""Lifting and group convolutions: turn the filter, then call `conv2d`.

Derivation, with `*` the cross-correlation of `conv2d`. Lifting (Eq. 7) correlates the image with every turned filter,
`F(., g) = f * T_g k`. A group convolution sums over the elements h of its input as well,

    out[o, g] = sum_{i, h} x[i, h] * T_g W[o, i, g^-1 h].

The bank `E[o, g, i, h] = T_g W[o, i, g^-1 h]` reshaped to [O*G, I*G, K, K] makes this one `conv2d`. It is equivariant because
`(T_u x) * (T_u w) = T_u (x * w)`: put h' = u^-1 h in the sum for `T_u x` and read off `T_u out[o, u^-1 g]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.exactness import Sampling, StrideGuard
from revit.groups import Group
from revit.nn import fourier, per_field
from revit.nn.algorithm import Algorithm, Work
from revit.nn.filter_bank import TurnedFilters
from revit.nn.matrix_products import multiply_positions, products_pay


class LiftingConv(nn.Module):
    r"""Lifts an image onto the group (Eq. 7): `F(x, g) = sum_c sum_x' f(x') k_c(g^-1 (x' - x))`.

    [B, C_in, H, W] -> [B, C_out, G, H', W']. Weight [C_out, C_in, K, K] for `free` filters, [C_out, C_in, P] for the
    other families of `revit.filters`. A stride that would break the symmetry raises `EquivarianceError` (`strict`).
    """

    def __init__(
        self,
        group: Group | str,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        filters: str = "auto",
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.group = Group.parse(group)
        self.in_channels, self.out_channels = check_fields(in_channels, out_channels)
        self.sampling = Sampling(kernel_size, stride, padding, dilation)
        self.guard = StrideGuard(self.group, self.sampling, strict=strict)
        self.filters = TurnedFilters(self.group, out_channels, in_channels, kernel_size, filters=filters, lifting=True)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the layer cannot be exact (or warns, if not strict)."""
        return self.guard.output_size(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image: |G| C_in C_out K^2 H' W'."""
        return self.group.order * self.in_channels * self.out_channels * self.sampling.kernel_size**2 * height * width

    @property
    def weight(self) -> nn.Parameter:
        return self.filters.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"expected images [B, {self.in_channels}, H, W], got shape {list(x.shape)}")
        self.output_size(*x.shape[-2:])
        out = _conv2d(x, self.filters(), self.bias, self.group.order, self.sampling)
        return out.unflatten(1, (self.out_channels, self.group.order))  # [B, C_out, G, H', W']

    def extra_repr(self) -> str:
        return _describe(self.group, self.in_channels, self.out_channels, self.sampling)


class GroupConv(nn.Module):
    r"""Group convolution: `out(x, g) = sum_{i, h} sum_y F_i(y, h) W_i(g^-1 (y - x), g^-1 h)`.

    [B, C_in, G, H, W] -> [B, C_out, G, H', W']. Weight [C_out, C_in/groups, G, K, K] for `free` filters, [..., G, P] for
    the other families. `groups` splits the fields as in `nn.Conv2d` (never inside a field); `groups=C_in` is the
    per-field convolution of separable projections. `algorithm` changes the cost and nothing else: `dense` is one `conv2d`
    with the expanded bank, `fourier` is that of `revit.nn.fourier`, which pays for many fields and large groups, and `auto`
    takes the faster one (`revit.nn.algorithm`).
    """

    def __init__(
        self,
        group: Group | str,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        filters: str = "auto",
        algorithm: str = "auto",
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.group = Group.parse(group)
        self.in_channels, self.out_channels = check_fields(in_channels, out_channels)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide the fields in ({in_channels}) and out ({out_channels})")
        self.groups = groups
        self.sampling = Sampling(kernel_size, stride, padding, dilation)
        self.guard = StrideGuard(self.group, self.sampling, strict=strict)
        self.filters = TurnedFilters(
            self.group, out_channels, in_channels // groups, kernel_size, filters=filters, lifting=False
        )
        work = Work(self.group, in_channels, out_channels, kernel_size, self.filters.num_functions)
        self.algorithm = Algorithm(algorithm, work, self.filters.filters, groups)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the layer cannot be exact (or warns, if not strict)."""
        return self.guard.output_size(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image: |G|^2 C_in C_out K^2 H' W', divided by `groups`, or fewer in
        the Fourier basis."""
        fewer = self.algorithm.products(height * width)
        return self.algorithm.work.dense_products // self.groups * height * width if fewer is None else fewer

    @property
    def weight(self) -> nn.Parameter:
        return self.filters.weight

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.in_channels, self.group)
        if self.algorithm.is_fourier_for(x, self.weight, math.prod(self.output_size(*x.shape[-2:]))):
            sight = fourier.Sight(self.filters.filters, self.sampling)
            return _add_bias(fourier.transform(x, self.filters.blocks(), self.group, sight), self.bias)
        if self.groups == self.in_channels == self.out_channels and per_field.pays(x, self.weight):
            return _add_bias(per_field.convolve(x, self.filters(), self.sampling), self.bias)
        out = _conv2d(x.flatten(1, 2), self.filters(), self.bias, self.group.order, self.sampling, self.groups)
        return out.unflatten(1, (self.out_channels, self.group.order))  # [B, C_out, G, H', W']

    def extra_repr(self) -> str:
        text = f"{_describe(self.group, self.in_channels, self.out_channels, self.sampling)}, {self.algorithm}"
        return text if self.groups == 1 else f"{text}, groups={self.groups}"


class GroupLinear(nn.Module):
    r"""1x1 group convolution: `out(x, g) = sum_{i, h} W[o, i, g^-1 h] F_i(x, h)`, one matrix product at each position.

    [B, C_in, G, H, W] -> [B, C_out, G, H, W]. Weight [C_out, C_in, G, 1, 1]: one number for each pair of fields and
    relative element, exact for every group. `algorithm` is that of `GroupConv`.
    """

    def __init__(
        self, group: Group | str, in_channels: int, out_channels: int, *, bias: bool = True, algorithm: str = "auto"
    ) -> None:
        super().__init__()
        self.group = Group.parse(group)
        self.in_channels, self.out_channels = check_fields(in_channels, out_channels)
        self.algorithm = Algorithm(algorithm, Work(self.group, in_channels, out_channels, 1, 1), "free")
        self.filters = TurnedFilters(self.group, out_channels, in_channels, 1, filters="free", lifting=False)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for a map of this size, of one image: |G|^2 C_in C_out H W, or fewer in the Fourier basis."""
        fewer = self.algorithm.products(height * width)
        return self.algorithm.work.dense_products * height * width if fewer is None else fewer

    @property
    def weight(self) -> nn.Parameter:
        return self.filters.weight

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.in_channels, self.group)
        return self.apply_expanded(x, self.expand(x))

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """`scale * layer(x)` for one number, which the weights take; without a bias."""
        weights = self.expand(x)
        weights = [block * scale for block in weights] if isinstance(weights, list) else weights * scale
        return self.apply_expanded(x, weights)

    def expand(self, x: Tensor) -> Tensor | list[Tensor]:
        """The weights for maps like x: the bank, or the blocks of the Fourier basis."""
        is_fourier = self.algorithm.is_fourier_for(x, self.weight, x.shape[-2] * x.shape[-1])
        return self.filters.blocks() if is_fourier else self.filters()

    def apply_expanded(self, x: Tensor, weights: Tensor | list[Tensor]) -> Tensor:
        """The layer with weights that were expanded before."""
        if isinstance(weights, list):
            return _add_bias(fourier.transform(x, weights, self.group), self.bias)
        x, order = x.flatten(1, 2), self.group.order
        if products_pay(x, weights):
            bias = None if self.bias is None else self.bias.repeat_interleave(order)
            out = multiply_positions(x, weights.flatten(1), bias)
        else:
            out = _conv2d(x, weights, self.bias, order, Sampling(1))
        return out.unflatten(1, (self.out_channels, order))

    def extra_repr(self) -> str:
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields, {self.algorithm}, exact"


class Pointwise(nn.Conv3d):
    """A linear map of the fields, the same at every position and element: [B, C_in, G, H, W] -> [B, C_out, G, H, W].

    A convolution of one pixel and one element, computed as the matrix product that it is, but in files for other programs.
    """

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(*check_fields(in_channels, out_channels), 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return super().forward(x)
        return multiply_positions(x, self.weight.flatten(1), self.bias)


def check_fields(in_channels: int, out_channels: int) -> tuple[int, int]:
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return in_channels, out_channels


def check_features(x: Tensor, channels: int, group: Group) -> None:
    if x.ndim != 5 or x.shape[1] != channels or x.shape[2] != group.order:
        raise ValueError(f"expected features [B, {channels}, {group.order}, H, W] on {group}, got shape {list(x.shape)}")


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, order: int, sampling: Sampling, groups: int = 1) -> Tensor:
    """One bias per field, the same for all its elements; everything else is an ordinary convolution."""
    if bias is not None:
        bias = bias.repeat_interleave(order)
    return F.conv2d(x, weight, bias, sampling.stride, sampling.padding, sampling.dilation, groups)


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype).view(-1, 1, 1, 1)


def _describe(group: Group, in_channels: int, out_channels: int, sampling: Sampling) -> str:
    exact = "exact" if group.is_exact else "exact for multiples of 90°"
    return f"{group}, {in_channels} -> {out_channels} fields, {sampling}, {exact}"
