"""Who is compared: the escnn-built reference and three models of ours, all of the same shape and on the same batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revit

REFERENCE = "reference"
BATCH, IMAGE_SIZE = 64, 28
SHAPE: dict[str, Any] = {"in_chans": 1, "dims": 12, "depths": 4, "num_heads": 6, "kernel_size": 5, "stride": 2}
DENSE: dict[str, Any] = {"elementwise_dropout": False, "attn_drop_rate": 0.0}
OURS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "separable": {**DENSE, "projection": "separable"},
    "same dropout": {},
}

# The released code halves 28 x 28 images with an odd kernel. All contestants do the same, which ours warn about.
warnings.filterwarnings("ignore", message="a layer with kernel_size=.* is not .* equivariant")


def builder(name: str, group: str) -> Callable[[], nn.Module]:
    """A function that constructs a contestant. Imports happen here, so that timing the function leaves them out."""
    if name == REFERENCE:
        from escnn_reference import Reference

        return partial(Reference, group, **SHAPE)
    return partial(revit.create_model, "revit_small_paper", group=group, strict=False, **SHAPE, **OURS[name])


def images(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, SHAPE["in_chans"], IMAGE_SIZE, IMAGE_SIZE)


def forward_task(model: nn.Module) -> Callable[[], None]:
    """A forward pass for inference."""
    x = images()

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            model(x)

    return forward


def step_task(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: int = BATCH) -> Callable[[], None]:
    """A training step: forward, cross entropy, backward, AdamW."""
    x, labels = images(batch), torch.randint(10, (batch,))
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step
