"""The answers of a model for a whole split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.data.loader import EvalLoader
from revit.evaluation.inference import evaluating


@dataclass(frozen=True)
class Outputs:
    """Logits and labels of the images of a split, on the CPU."""

    logits: Tensor  # [N, K]
    labels: Tensor  # [N]
    samples: NDArray[np.int64]  # [N], numbers in the split
    bad: list[tuple[str, str]] = field(default_factory=list)  # images that were skipped, with the reason


def collect_logits(
    model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype = torch.float32, *,
    check: Callable[[], None] | None = None,
) -> Outputs:  # fmt: skip
    """Runs the model in eval mode over a loader. `check` is called after each batch and may raise to stop."""
    logits: list[Tensor] = [torch.zeros(0, loader.spec.num_classes, dtype=dtype)]
    labels: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
    samples: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    bad: list[tuple[str, str]] = []
    with evaluating(model):
        for batch in loader:
            logits.append(model(loader.prepare(batch, device, dtype)).cpu())
            labels.append(batch.labels)
            samples.append(batch.samples)
            bad += batch.bad
            if check is not None:
                check()
    return Outputs(torch.cat(logits), torch.cat(labels), np.concatenate(samples), bad)


def join_outputs(parts: Sequence[Outputs]) -> Outputs:
    """The outputs of several processes in the order of the split. No image may be counted twice."""
    samples = np.concatenate([part.samples for part in parts])
    order = np.argsort(samples, kind="stable")
    if len(np.unique(samples)) != len(samples):
        raise ValueError("an image was evaluated by two processes")
    index = torch.from_numpy(order)
    logits, labels = torch.cat([part.logits for part in parts])[index], torch.cat([part.labels for part in parts])[index]
    return Outputs(logits, labels, samples[order], [entry for part in parts for entry in part.bad])
