"""Regularisers that keep equivariance: masks per sample, or per sample and field, never per position or element."""

from __future__ import annotations

from torch import Tensor, nn


def check_rate(name: str, rate: float) -> float:
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be in [0, 1), got {rate!r}")
    return rate


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Drops whole samples of a residual branch with probability `rate` and scales the others up."""
    if rate == 0 or not training:
        return x
    keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * (keep / (1 - rate))


class DropPath(nn.Module):
    """Stochastic depth: the mask is one number per sample, so the layer is equivariant for each draw."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = check_rate("drop_path", rate)

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.rate, self.training)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def make_dropout(rate: float, *, elementwise: bool = False, inplace: bool = False) -> nn.Module:
    """Dropout for [B, C, G, H, W]: whole fields (equivariant for each draw), or single numbers as the released code does
    (equivariant in distribution only, and as costly as a layer). `inplace` is for what follows a norm or a convolution, which
    need their input for the backward pass and not their output."""
    check_rate("dropout", rate)
    if rate == 0:
        return nn.Identity()
    return nn.Dropout(rate, inplace) if elementwise else nn.Dropout3d(rate, inplace)
