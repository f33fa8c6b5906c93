r"""Lifting and group convolutions: turn the filter, then call `conv2d`.

Derivation, with `*` the cross-correlation of `conv2d`. Lifting (Eq. 7) correlates the image with every turned filter,
`F(., g) = f * T_g k`. A group convolution sums over the elements h of its input as well,

    out[o, g] = sum_{i, h} x[i, h] * T_g W[o, i, g^-1 h].

The bank `E[o, g, i, h] = T_g W[o, i, g^-1 h]` reshaped to [O*G, I*G, K, K] makes this one `conv2d`. It is equivariant because
`(T_u x) * (T_u w) = T_u (x * w)`: put h' = u^-1 h in the sum for `T_u x` and read off `T_u out[o, u^-1 g]`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.actions import kernel_bank, turn_index, turn_table
from revit.exactness import Sampling, StrideGuard
from revit.filters import centre_function, check_filters, num_functions
from revit.groups import Group


class _Cache(NamedTuple):
    """A bank and the weight that it was built from: a copy on the CPU, elsewhere the same storage and its version."""

    bank: Tensor
    weight: Tensor
    version: int

    @classmethod
    def of(cls, weight: nn.Parameter, bank: Tensor) -> _Cache:
        return cls(bank, weight.detach().clone() if weight.is_cpu else weight.detach(), weight._version)

    def fits(self, weight: nn.Parameter) -> bool:
        if weight.is_cpu:  # by content: nothing else sees changes made through `weight.data`
            return self.weight.dtype == weight.dtype and torch.equal(self.weight, weight)
        same = (self.weight.data_ptr(), self.weight.dtype, self.weight.device) == (
            weight.data_ptr(),
            weight.dtype,
            weight.device,
        )
        return same and self.version == weight._version


class TurnedFilters(nn.Module):
    """Filters of one family and their bank under a group: the weight of `LiftingConv` and `GroupConv`.

    Call it to get the `conv2d` weight [O*G, I(*G), K, K]. While gradients are recorded the bank is built anew at each
    call (once per optimiser step and micro-batch); without them it is built once and kept until the weight changes.
    """

    def __init__(
        self, group: Group, out_channels: int, in_channels: int, kernel_size: int, *, filters: str, lifting: bool
    ) -> None:
        super().__init__()
        self.group, self.kernel_size, self.lifting = group, kernel_size, lifting
        self.filters = check_filters(filters, group, kernel_size)
        fields = (out_channels, in_channels) if lifting else (out_channels, in_channels, group.order)
        self.num_functions = num_functions(self.filters, kernel_size)
        is_pixels = self.filters in ("free", "interpolate")
        self.filter_shape = (kernel_size, kernel_size) if is_pixels else (self.num_functions,)
        self.weight = nn.Parameter(torch.empty(*fields, *self.filter_shape))
        table = turn_table(group, kernel_size, self.filters)
        dtype = self.weight.dtype
        self.register_buffer("basis", None if table.basis is None else table.basis.to(dtype), persistent=False)
        self.register_buffer("index", turn_index(table, lifting=lifting), persistent=False)
        self.basis: Tensor | None
        self.index: Tensor
        self._cache: _Cache | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights scaled so that the output has the variance of the input."""
        with torch.no_grad():
            energy = self.num_functions if self.basis is None else self.basis[0].square().sum().item()
            fan_in = self.weight.shape[1 : -len(self.filter_shape)].numel()
            self.weight.normal_(std=1 / math.sqrt(fan_in * energy))

    def reset_delta_orthogonal(self, parts: int = 1) -> None:
        """All weight on the centre pixel, where each of `parts` equal parts of the output is an orthogonal map of the input."""
        centre = centre_function(self.filters, self.kernel_size)
        with torch.no_grad():
            flat = self.weight.view(*self.weight.shape[: -len(self.filter_shape)], self.num_functions)
            flat.zero_()
            flat[..., centre] = orthogonal_fields(self.group, flat.shape[:-1], parts)

    def forward(self) -> Tensor:
        if torch.compiler.is_compiling() or self.weight.is_inference():
            return self._build()
        if torch.is_grad_enabled() and self.weight.requires_grad:
            self._cache = None
            return self._build()
        if self._cache is None or not self._cache.fits(self.weight):
            with torch.no_grad():
                self._cache = _Cache.of(self.weight, self._build())
        return self._cache.bank

    def _build(self) -> Tensor:
        weight = self.weight.flatten(-2) if len(self.filter_shape) == 2 else self.weight
        bank = kernel_bank(weight, self.basis, self.index)  # [O, G, I, (G,) K*K]
        size = self.kernel_size
        out_channels = bank.shape[0] * bank.shape[1]
        return bank.reshape(out_channels, -1, size, size)  # [O*G, I(*G), K, K]

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._cache = None
        applied = super()._apply(fn, recurse)
        if self.basis is not None and self.basis.dtype == torch.float64:
            # A float32 basis turned into float64 would carry its rounding along: evaluate it again.
            table = turn_table(self.group, self.kernel_size, self.filters)
            assert table.basis is not None
            self.basis = table.basis.to(self.basis.device)
        return applied

    def extra_repr(self) -> str:
        return f"{self.filters}, {self.num_functions} functions"


def orthogonal_fields(group: Group, shape: torch.Size, parts: int = 1) -> Tensor:
    """Random fields [O, I, G] (or lifting, [O, I]) whose bank is a (semi-)orthogonal matrix, for each of `parts` parts of O.

    A random matrix in the group algebra is divided by its own magnitude (polar decomposition), which stays in the
    algebra. The rotations are diagonalised first, so that only small blocks are decomposed.
    """
    if len(shape) == 2:
        return _polar(torch.randn(parts, shape[0] // parts, shape[1])).reshape(shape) / math.sqrt(group.order)
    in_fields, order = shape[1:]
    out_fields, rotations, mirrors = shape[0] // parts, group.rotations, order // group.rotations
    weight = torch.randn(parts, out_fields, in_fields, order, dtype=torch.float64)
    # The bank W[o, i, g^-1 h] depends on the difference of its two rotations only: the columns h of rotation 0 hold all of it.
    column = weight[..., group.product[group.inverse][:, ::rotations]]  # [parts, O, I, M*N, M]
    column = column.view(parts, out_fields, in_fields, mirrors, rotations, mirrors).permute(4, 0, 1, 3, 2, 5)
    blocks = torch.fft.rfft(column, dim=0)  # [N//2+1, parts, O, M, I, M]
    polar = _polar(blocks.reshape(-1, out_fields * mirrors, in_fields * mirrors)).view(blocks.shape)
    rows = torch.fft.irfft(polar, n=rotations, dim=0)[-torch.arange(rotations) % rotations, :, :, 0]  # [N, parts, O, I, M]
    return rows.permute(1, 2, 3, 4, 0).reshape(shape)  # the row of the identity


def _polar(matrices: Tensor) -> Tensor:
    """The (semi-)orthogonal factor of each matrix, `M (M^H M)^-1/2`, through the smaller Gram matrix."""
    if matrices.shape[-2] < matrices.shape[-1]:
        return _polar(matrices.mH).mH
    values, vectors = torch.linalg.eigh(matrices.mH @ matrices)
    return matrices @ (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mH


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
    per-field convolution of separable projections.
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
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the layer cannot be exact (or warns, if not strict)."""
        return self.guard.output_size(height, width)

    @property
    def weight(self) -> nn.Parameter:
        return self.filters.weight

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.in_channels, self.group)
        self.output_size(*x.shape[-2:])
        out = _conv2d(x.flatten(1, 2), self.filters(), self.bias, self.group.order, self.sampling, self.groups)
        return out.unflatten(1, (self.out_channels, self.group.order))  # [B, C_out, G, H', W']

    def extra_repr(self) -> str:
        text = _describe(self.group, self.in_channels, self.out_channels, self.sampling)
        return text if self.groups == 1 else f"{text}, groups={self.groups}"


class GroupLinear(nn.Module):
    r"""1x1 group convolution: `out(x, g) = sum_{i, h} W[o, i, g^-1 h] F_i(x, h)`, one matrix product at each position.

    [B, C_in, G, H, W] -> [B, C_out, G, H, W]. Weight [C_out, C_in, G, 1, 1]: one number for each pair of fields and
    relative element, exact for every group.
    """

    def __init__(self, group: Group | str, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__()
        self.group = Group.parse(group)
        self.in_channels, self.out_channels = check_fields(in_channels, out_channels)
        self.filters = TurnedFilters(self.group, out_channels, in_channels, 1, filters="free", lifting=False)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    @property
    def weight(self) -> nn.Parameter:
        return self.filters.weight

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.in_channels, self.group)
        out = _conv2d(x.flatten(1, 2), self.filters(), self.bias, self.group.order, Sampling(1))
        return out.unflatten(1, (self.out_channels, self.group.order))

    def extra_repr(self) -> str:
        return f"{self.group}, {self.in_channels} -> {self.out_channels} fields, exact"


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


def _describe(group: Group, in_channels: int, out_channels: int, sampling: Sampling) -> str:
    exact = "exact" if group.is_exact else "exact for multiples of 90°"
    return f"{group}, {in_channels} -> {out_channels} fields, {sampling}, {exact}"
