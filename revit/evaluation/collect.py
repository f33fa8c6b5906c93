"""The answers of a model for a whole split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.data.loader import EvalLoader


@dataclass(frozen=True)
class Outputs:
    """Logits and labels of the images of a split, on the CPU."""

    logits: Tensor  # [N, K]
    labels: Tensor  # [N]
    samples: NDArray[np.int64]  # [N], numbers in the split
    bad: list[tuple[str, str]] = field(default_factory=list)  # images that were skipped, with the reason


@torch.no_grad()
def collect_logits(
    model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype = torch.float32, *,
    check: Callable[[], None] | None = None,
) -> Outputs:  # fmt: skip
    """Runs the model in eval mode over a loader. `check` is called after each batch and may raise to stop."""
    logits: list[Tensor] = [torch.zeros(0, loader.spec.num_classes, dtype=dtype)]
    labels: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
    samples: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    bad: list[tuple[str, str]] = []
    was_training = model.training
    model.eval()
    try:
        for batch in loader:
            logits.append(model(loader.prepare(batch, device, dtype)).cpu())
            labels.append(batch.labels)
            samples.append(batch.samples)
            bad += batch.bad
            if check is not None:
                check()
    finally:
        model.train(was_training)
    return Outputs(torch.cat(logits), torch.cat(labels), np.concatenate(samples), bad)
