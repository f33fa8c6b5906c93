"""The weights of equivariant convolutions: filters of one family, their bank under a group, and how they start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from revit.actions import kernel_bank, turn_index, turn_table
from revit.filters import centre_function, check_filters, num_functions
from revit.groups import Group
from revit.nn.fourier_basis import change_blocks, filter_blocks

T = TypeVar("T")


class _Cache(NamedTuple, Generic[T]):
    """What was made of a weight, and that weight: a copy on the CPU, elsewhere the same storage and its version."""

    made: T
    weight: Tensor
    version: int

    @classmethod
    def of(cls, weight: nn.Parameter, made: T) -> _Cache[T]:
        return cls(made, weight.detach().clone() if weight.is_cpu else weight.detach(), weight._version)

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

    Call it to get the `conv2d` weight [O*G, I(*G), K, K]; `blocks` are the same filters in the Fourier basis of the group.
    While gradients are recorded they are built anew at each call (once per optimiser step and micro-batch); without them they
    are built once and kept until the weight changes.
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
        self._bank: _Cache[Tensor] | None = None
        self._blocks: _Cache[list[Tensor]] | None = None
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
        self._bank, bank = self._make(self._bank, self._build)
        return bank

    def blocks(self) -> list[Tensor]:
        """The matrices of `revit.nn.fourier.transform`, for filters that turn into each other."""
        self._blocks, blocks = self._make(self._blocks, self._build_blocks)
        return blocks

    def change_blocks(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor | None:
        """A weight like ours whose matrices in the Fourier basis were changed, None for filters that have none: they are
        lifting, or made of one field each, or do not turn into each other."""
        if self.lifting or self.weight.shape[1] == 1:
            return None
        try:
            flat = weight.reshape(*weight.shape[:3], self.num_functions)
            return change_blocks(flat, self.group, self.filters, self.kernel_size, change).view_as(weight)
        except ValueError:
            return None

    def _make(self, kept: _Cache[T] | None, build: Callable[[], T]) -> tuple[_Cache[T] | None, T]:
        if torch.compiler.is_compiling() or self.weight.is_inference():
            return kept, build()
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return None, build()
        if kept is None or not kept.fits(self.weight):
            with torch.no_grad():
                kept = _Cache.of(self.weight, build())
        return kept, kept.made

    def _build_blocks(self) -> list[Tensor]:
        return filter_blocks(self._flat(), self.group, self.filters, self.kernel_size)

    def _flat(self) -> Tensor:
        return self.weight.flatten(-2) if len(self.filter_shape) == 2 else self.weight

    def _build(self) -> Tensor:
        bank = kernel_bank(self._flat(), self.basis, self.index)  # [O, G, I, (G,) K*K]
        size = self.kernel_size
        out_channels = bank.shape[0] * bank.shape[1]
        return bank.reshape(out_channels, -1, size, size)  # [O*G, I(*G), K, K]

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._bank = self._blocks = None
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
