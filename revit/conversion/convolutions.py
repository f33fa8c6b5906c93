"""Convolutions of escnn in a state dict: their group, their kernel, and their weights in terms of our functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from revit.conversion.filters import LARGEST_LEFTOVER, expand_coefficients, fit_banks
from revit.conversion.state import ConversionError, StateReader
from revit.groups import Group

MAX_KERNEL = 15
"""Larger kernels are refused: the released code has none above 11."""


def find_kernel_size(state: StateReader, layer: str) -> int:
    """The side of the kernel of a convolution, from its sampled functions [B, G, G, K*K] or its filter [O, I, K, K]."""
    key = state.functions_key(layer)
    sampled = state.peek(key or f"{layer}.filter", or_else=f"neither the sampled functions nor the filter of {layer} are there")
    area = 0 if sampled.ndim != 4 or not sampled.numel() else sampled.shape[-1] if key else sampled.shape[-1] ** 2
    size = math.isqrt(area)
    if size**2 != area or size % 2 == 0 or size > MAX_KERNEL:
        raise ConversionError(
            f"{layer} has {'functions' if key else 'a filter'} of shape {list(sampled.shape)}: not those of an odd kernel up to"
            f" {MAX_KERNEL} x {MAX_KERNEL}"
        )
    return size


def lifting_banks(state: StateReader, layer: str) -> Tensor:
    """What the lifting layer has been turned into for each element, [F, G, K, K]: its functions, or else its filter."""
    size, order = find_kernel_size(state, layer), state.group_order
    if size == 1:
        raise ConversionError(f"{layer} has a kernel of one pixel, which tells nothing about the group")
    key = state.functions_key(layer)
    sampled = state.peek(key or f"{layer}.filter")
    if sampled.shape[1:3] != (order, 1) if key else sampled.shape[0] % order or sampled.shape[2] != size:
        raise ConversionError(f"{layer} has filters of shape {list(sampled.shape)}, not those of {order} elements")
    if key:
        return sampled.reshape(-1, order, size, size)
    return sampled.unflatten(0, (-1, order)).transpose(1, 2).flatten(0, 1)


def find_group(banks: Tensor, layer: str) -> Group:
    """The group of this many elements whose turns lead from filter to filter: they tell C8 from D4, and z2m from p2."""
    order = banks.shape[1]
    groups = [Group(order), *([Group(order // 2, True)] if order % 2 == 0 else [])]
    leftovers = {group: fit_banks(banks, group)[1] for group in groups}
    group = min(leftovers, key=lambda group: leftovers[group])
    if not banks.any() or leftovers[group] > LARGEST_LEFTOVER:
        names = " or ".join(group.name for group in groups)
        raise ConversionError(f"the filters of {layer} do not turn as those of {names} (they differ by {leftovers[group]:.0e})")
    return group


class Convolutions:
    """Takes convolutions out of a state dict as weights of ours, and keeps the largest error of an expansion."""

    def __init__(self, state: StateReader, group: Group) -> None:
        self.state, self.group, self.leftover = state, group, 0.0

    def take(self, layer: str, out_fields: int, in_fields: int, size: int, *, lifting: bool = False) -> Tensor:
        """The weight [O, I, (G,) P] of a convolution, in float64."""
        order, key = self.group.order, self.state.functions_key(layer)
        columns = 1 if lifting else order
        coefficients = self.state.take(f"{layer}.weights", -1)
        filter = self.state.take_if_there(f"{layer}.filter", out_fields * order, in_fields * columns, size, size)
        if filter is not None:
            filter = filter.unflatten(1, (in_fields, columns)).unflatten(0, (out_fields, order))  # [O, G, I, G, K, K]
        functions = None if key is None else self.state.take(key, -1, order, columns, size**2).unflatten(-1, (size, size))
        each = len(coefficients) // (out_fields * in_fields) if functions is None else len(functions)
        if not each or len(coefficients) != out_fields * in_fields * each:
            raise ConversionError(
                f"{layer}.weights has {len(coefficients)} coefficients, expected {out_fields} x {in_fields} fields"
                f" x {'the number of' if functions is None else each} functions"
            )
        if functions is not None:
            coefficients = coefficients.view(out_fields, in_fields, each)
            if filter is not None:
                _check_filter(filter, expand_coefficients(coefficients.float(), functions), layer)
            fitted = self._fit(functions, layer, lifting)  # [B, (G,) P]
            return torch.tensordot(coefficients.double(), fitted, dims=1)
        if filter is None or not filter.any():
            raise ConversionError(f"{layer} has coefficients, but neither their sampled functions nor its filter is there")
        return self._fit(filter.transpose(1, 2).flatten(0, 1), layer, lifting).unflatten(0, (out_fields, in_fields))

    def _fit(self, banks: Tensor, layer: str, lifting: bool) -> Tensor:
        weights, leftover = fit_banks(banks.squeeze(2) if lifting else banks, self.group)
        if leftover > LARGEST_LEFTOVER:
            raise ConversionError(
                f"the filters of {layer} do not turn as those of {self.group} (they differ by {leftover:.0e})"
            )
        self.leftover = max(self.leftover, leftover)
        return weights


def _check_filter(filter: Tensor, expanded: Tensor, layer: str) -> None:
    """A filter that was saved must be that of the coefficients, or zero: so it is before a model was first trained or used."""
    scale = expanded.abs().max()
    limit = 0.02 if torch.finfo(filter.dtype).bits < 32 else 1e-3
    if filter.any() and (filter - expanded).abs().max() > limit * scale:
        raise ConversionError(f"{layer}.filter is not what {layer}.weights expand to: one of them was changed")
