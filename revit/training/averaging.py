"""The moving average of the weights (EMA): what is evaluated and saved when it is on."""

from __future__ import annotations

import copy

import torch
from torch import nn

from revit.training.sharding import whole_tensors


class AveragedModel:
    """A copy of a model whose weights follow the original slowly. In the first steps it follows faster."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After step `step` (from 0): `average <- decay * average + (1 - decay) * weights`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averaged, current = self.module.state_dict(), whole_tensors(model.state_dict())
        pairs = [(mean, current[name]) for name, mean in averaged.items() if mean.is_floating_point()]
        torch._foreach_lerp_([mean for mean, _ in pairs], [value for _, value in pairs], 1 - decay)
        for name, mean in averaged.items():
            if not mean.is_floating_point():
                mean.copy_(current[name])
