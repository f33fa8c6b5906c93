"""Batched products of matrices, by whichever of the two libraries that torch comes with is the faster one here.

`torch.bmm` is computed by MKL, convolutions by oneDNN. On Intel's processors MKL is the faster one, also for convolutions of
one pixel. It leaves the widest instructions of other makers' processors alone, where oneDNN is faster. Torch calls oneDNN for
matrices of float32 only in compiled programs, by an operation for linear layers, which `multiply` and `add_product` call too;
they have no gradients, being the products inside of operations that have their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode

LARGE = 2**22
"""Products from which on a call for each matrix pays."""
CPU_INFO, INTEL = Path("/proc/cpuinfo"), "GenuineIntel"


def multiply_positions(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same matrix [O, I] at every position: x [B, I, ...] -> [B, O, ...]. A convolution of one pixel.

    Also without a bias by `baddbmm`: counters take products of `bmm` for those of tokens (`revit.evaluation.complexity`).
    """
    start = x.new_zeros(1, 1) if bias is None else bias.unsqueeze(1)
    out = torch.baddbmm(start, weight.expand(len(x), -1, -1), x.flatten(2), beta=0 if bias is None else 1)
    return out.unflatten(2, x.shape[2:])


def products_pay(x: Tensor, weight: Tensor) -> bool:
    """Whether `multiply_positions` is faster than a convolution: on Intel's processors, where MKL takes two thirds to nine
    tenths of the time of oneDNN (`benchmarks/shapes.py`), and for matrices of fewer numbers than the maps: their gradients are
    formed for each sample and then added."""
    few = weight.numel() <= x.shape[2:].numel() * (weight.shape[0] + weight.shape[1])
    return few and is_eager_on_cpu(x) and torch.backends.mkl.is_available() and not mkl_is_slow()


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether operations on x are computed here and now, on a CPU, at single or double precision: neither recorded as a program
    nor counted by torch, for both of which the plain ones say more."""
    program = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    exact = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return x.is_cpu and exact and not program and not is_counted()


def is_counted() -> bool:
    """Whether a `FlopCounterMode` is at work."""
    return any(isinstance(mode, _FlopCounterMode) for mode in _get_current_dispatch_mode_stack())


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a b`: [N, R, K] and [N, K, C] -> [N, R, C]."""
    if (linear := _linear_for(a, b)) is None:
        torch.bmm(a, b, out=out)
        return
    for rows, columns, result in zip(a.unbind(), b.mT.unbind(), out.unbind(), strict=True):
        result.copy_(linear(rows, columns))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b`: [N, R, C], [N, R, K] and [N, K, C]."""
    if (linear := _linear_for(a, b)) is None:
        total.baddbmm_(a, b)
        return
    for rows, columns, result in zip(a.unbind(), b.mT.unbind(), total.unbind(), strict=True):
        result.add_(linear(rows, columns))


def _linear_for(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    large = a.shape[1] * a.shape[2] * b.shape[2] >= LARGE
    return onednn_linear() if large and a.dtype == torch.float32 and a.is_cpu else None


@cache
def onednn_linear() -> Callable[[Tensor, Tensor], Tensor] | None:
    """`x [R, K], weight [C, K] -> x weight^T` by oneDNN, where that is the faster library and can be called."""
    if not mkl_is_slow():
        return None
    try:
        operation = torch.ops.mkldnn._linear_pointwise.default
        sample = operation(torch.ones(1, 1), torch.ones(1, 1), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None  # another version of torch, or one without oneDNN
    return (lambda x, weight: operation(x, weight, None, "none", [], "")) if sample.item() == 1 else None


@cache
def mkl_is_slow() -> bool:
    """Whether the processor is of a maker whose widest instructions MKL does not use, as far as the system tells."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    makers = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    return bool(makers) and INTEL not in makers
