"""Normalisation that shares its statistics and its affine parameters along the group.

Statistics per (field, element) would make the elements of a field distinguishable and break equivariance, also in eval
mode. Batch norm over [B, G, H, W] is that of `nn.BatchNorm3d`; layer norm acts on the fields at each (position, element).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("batch", "layer")


class FieldBatchNorm(nn.BatchNorm3d):
    """`nn.BatchNorm3d` on [B, C, G, H, W]: one mean and variance per field, faster in training on a CPU.

    The statistics of torch are slow there beside plain sums. Two passes, the second on what is left of the mean, lose no
    digits either.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_fast_for(x):
            return super().forward(x)
        out: Tensor
        out, mean, variance = _BatchNorm.apply(x, self.weight, self.bias, self.eps)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            count = x.numel() // x.shape[1]
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), momentum)
        return out

    def _is_fast_for(self, x: Tensor) -> bool:
        """In training, eagerly, on a CPU, at one precision; what is wrong with x is left to `nn.BatchNorm3d` to say."""
        whole = self.affine and self.bias is not None and self.running_mean is not None
        eager = not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None)
        plain = whole and x.is_cpu and x.is_contiguous() and x.dtype == self.weight.dtype
        fits = x.ndim == 5 and x.shape[1] == self.num_features and x.numel() > x.shape[1]
        return self.training and eager and plain and fits


class _BatchNorm(torch.autograd.Function):
    """x [B, C, G, H, W] normalised over all but the fields, and the mean and variance [C] that were taken out."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.flatten(2).mean(2).mean(0)
        out = x - mean.view(-1, 1, 1, 1)
        squares = torch.linalg.vector_norm(out.flatten(2), dim=2).square().sum(0)  # by rows: faster than all at once
        variance = squares * (x.shape[1] / x.numel())
        out.mul_((weight * (variance + eps).rsqrt()).view(-1, 1, 1, 1)).add_(bias.view(-1, 1, 1, 1))
        return out, mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, variance = output
        ctx.mark_non_differentiable(mean, variance)
        ctx.save_for_backward(x, weight, mean, (variance + ctx.eps).rsqrt())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = torch.ops.aten.native_batch_norm_backward(
            grads[0].contiguous(), x, weight, None, None, mean, scale, True, ctx.eps, wanted
        )
        return *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)), None


class FieldLayerNorm(nn.Module):
    """Layer norm over the C fields at each position and element of [B, C, G, H, W]."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1)  # [B, G, H, W, C]
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).movedim(-1, 1)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} fields"


def make_norm(norm: str, channels: int) -> nn.Module:
    """A norm layer for [B, C, G, H, W] by name: `batch` (one mean and variance per field) or `layer`."""
    if norm == "batch":
        return FieldBatchNorm(channels)
    if norm == "layer":
        return FieldLayerNorm(channels)
    raise ValueError(f"unknown norm {norm!r}; choose {', '.join(NORMS)}")
