"""Asking a model without changing it: evaluation mode, no gradients, and everything as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Each module gets its own mode back: parts that were frozen in eval stay frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model computes, and in which precision: those of its first floating-point parameter or buffer."""
    for values in (*model.parameters(), *model.buffers()):
        if values.is_floating_point():
            return values.device, values.dtype
    return torch.device("cpu"), torch.float32
