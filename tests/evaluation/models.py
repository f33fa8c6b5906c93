"""Tiny models whose answers are known: one that no turn can change, and some that a turn must change."""

import torch
from torch import nn


class Plain(nn.Module):
    """A convolution and a mean over the upper half: nothing about it is invariant."""

    def __init__(self, channels=1, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, classes, 3, padding=1)

    def forward(self, x):
        maps = self.conv(x)
        return maps[..., : maps.shape[-2] // 2, :].mean((-2, -1))


class OrbitMean(nn.Module):
    """The mean of a model over the eight turns and mirrors of the input: exactly p4m invariant, by torch.rot90 and flip."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        orbit = [torch.rot90(y, r, (-2, -1)) for y in (x, x.flip(-1)) for r in range(4)]
        return torch.stack([self.inner(y) for y in orbit]).sum(0)


class Sides(nn.Module):
    """Which half is brighter, left (0) or right (1)?"""

    def forward(self, x):
        half = x.shape[-1] // 2
        return torch.stack([x[..., :half].sum((1, 2, 3)), x[..., -half:].sum((1, 2, 3))], dim=1)


class WithFeatures(nn.Module):
    """Pooled pixels as features, a linear classifier on them."""

    def __init__(self, channels=3, classes=3):
        super().__init__()
        self.fc = nn.Linear(channels, classes)

    def forward_features(self, x):
        return x

    def forward_head(self, x, *, pre_logits=False):
        pooled = x.mean((-2, -1))
        return pooled if pre_logits else self.fc(pooled)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))
