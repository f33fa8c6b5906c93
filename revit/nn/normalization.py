"""Normalisation that shares its statistics and its affine parameters along the group.

Statistics per (field, element) would make the elements of a field distinguishable and break equivariance, also in eval
mode. Batch norm over [B, G, H, W] is `nn.BatchNorm3d` as it is; layer norm acts on the fields at each (position, element).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("batch", "layer")


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
        return nn.BatchNorm3d(channels)
    if norm == "layer":
        return FieldLayerNorm(channels)
    raise ValueError(f"unknown norm {norm!r}; choose {', '.join(NORMS)}")
