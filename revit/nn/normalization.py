"""Normalisation that shares its statistics and its affine parameters along the group.

Statistics per (field, element) would make the elements of a field distinguishable and break equivariance, also in eval
mode. Batch norm over [B, G, H, W] is that of `nn.BatchNorm3d`; layer norm acts on the fields at each (position, element).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("batch", "layer")
DIGITS_LOST = 16.0
"""Times the variance that the square of the mean may be until sums of squares are not taken: one digit and a half."""


class FieldBatchNorm(nn.BatchNorm3d):
    """`nn.BatchNorm3d` on [B, C, G, H, W]: one mean and variance per field, faster in training on a CPU.

    The statistics of torch are slow there beside plain sums. Where a part of a model is computed a second time for
    the backward pass, `kept` hands it the statistics of the first time.
    """

    kept: KeptStatistics | None = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale`, a number, multiplies the result."""
        if not self._is_fast_for(x):
            return super().forward(x) if scale is None else super().forward(x) * scale
        again = self.kept is not None and self.kept.again
        found = self.kept.found.pop(0) if self.kept and again and self.kept.found else field_statistics(x)
        if self.kept and not again:
            self.kept.found.append(found)
        if not again:
            self.remember(*found, x.numel() // x.shape[1])
        weight, bias = (self.weight, self.bias) if scale is None else (self.weight * scale, self.bias * scale)
        out: Tensor = _BatchNorm.apply(x, weight, bias, *found, self.eps)
        return out

    def remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Counts a batch with these statistics of so many numbers of each field."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), momentum)

    def _is_fast_for(self, x: Tensor) -> bool:
        """What is wrong with x is left to `nn.BatchNorm3d` to say."""
        fits = x.ndim == 5 and x.shape[1] == self.num_features and x.numel() > x.shape[1]
        return self.is_plain_for(x) and x.is_contiguous() and fits

    def is_plain_for(self, x: Tensor) -> bool:
        """In training, eagerly, on a CPU, at one precision."""
        whole = self.affine and self.bias is not None and self.running_mean is not None
        eager = not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None)
        return self.training and eager and whole and x.is_cpu and x.dtype == self.weight.dtype


@dataclass
class KeptStatistics:
    """What a norm found in each call while a part of a model was run, in order; `again` in the second run of it."""

    found: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    again: bool = False


@torch.no_grad()
def field_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of the fields of x [B, C, G, H, W].

    The variance is the mean square less the square of the mean, by rows of the memory. Where the mean is so large that this
    would lose digits, it is the mean square of what is left of the mean, a pass and a copy more.
    """
    rows, share = x.flatten(2), x.shape[1] / x.numel()  # [B, C, G*H*W]
    mean = rows.mean(2).mean(0)
    squares = torch.linalg.vector_norm(rows, dim=2).square().sum(0)
    return mean, variance_of(x, mean, squares * share)


def variance_of(x: Tensor, mean: Tensor, mean_square: Tensor) -> Tensor:
    """The variance [C] of the fields of x, given their means and mean squares."""
    variance = mean_square - mean.square()
    if loses_digits(mean, variance):
        rows = x.flatten(2) - mean.unsqueeze(1)
        variance = torch.linalg.vector_norm(rows, dim=2).square().sum(0) * (x.shape[1] / x.numel())
    return variance


def loses_digits(mean: Tensor, variance: Tensor) -> bool:
    """Whether some mean is so large beside its variance that x must be less the mean before anything else is done to it."""
    return bool((mean.square() > DIGITS_LOST * variance).any())


class _BatchNorm(torch.autograd.Function):
    """x [B, C, G, H, W] normalised over all but the fields by its mean and variance [C]; gradients go through these as well."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        if loses_digits(mean, variance):
            shape = (-1, 1, 1, 1)
            out = (x - mean.view(shape)).mul_((weight * (variance + eps).rsqrt()).view(shape))
            return out.add_(bias.view(shape))
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, mean, variance, ctx.eps = inputs
        ctx.save_for_backward(x, weight, mean, (variance + ctx.eps).rsqrt())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wanted, grad = list(ctx.needs_input_grad[:3]), grads[0].contiguous()
        found = torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, mean, scale, True, ctx.eps, wanted)
        return *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)), None, None, None


def gradient_of(
    weight: Tensor, mean: Tensor, scale: Tensor, of_weight: Tensor, of_bias: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers a, b and c [C] for which `a grad + b x + c` is the gradient of x."""
    a = weight * scale
    b = -a * scale * of_weight * share
    return a, b, -a * of_bias * share - b * mean


class FieldLayerNorm(nn.Module):
    """Layer norm over the C fields at each position and element of [B, C, G, H, W]."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale`, a number, multiplies the result."""
        x = x.movedim(1, -1)  # [B, G, H, W, C]
        weight, bias = (self.weight, self.bias) if scale is None else (self.weight * scale, self.bias * scale)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps).movedim(-1, 1)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} fields"


def make_norm(norm: str, channels: int) -> nn.Module:
    """A norm layer for [B, C, G, H, W] by name: `batch` (one mean and variance per field) or `layer`."""
    if norm == "batch":
        return FieldBatchNorm(channels)
    if norm == "layer":
        return FieldLayerNorm(channels)
    raise ValueError(f"unknown norm {norm!r}; choose {', '.join(NORMS)}")
