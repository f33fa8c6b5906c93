"""How good masks are: mean IoU, pixel accuracy, per class. From counts of pixels, so memory does not grow with the images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.data.loader import EvalLoader
from revit.data.spec import IGNORED
from revit.evaluation.inference import evaluating


@dataclass(frozen=True)
class MaskOutputs:
    """What a model said about the pixels of a split that count, as sums."""

    confusion: Tensor  # [K, K], pixels: rows are the truth, columns the predictions
    loss: float  # sum of the negative log-likelihoods, in nats
    samples: NDArray[np.int64]  # [N], numbers in the split
    bad: list[tuple[str, str]] = field(default_factory=list)  # images that were skipped, with the reason


@dataclass(frozen=True)
class MaskClassScores:
    """One class against all others. A quotient without a denominator is None."""

    name: str
    support: int  # pixels of this class
    iou: float | None  # pixels that are of it and called so / pixels that are the one or the other
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class MaskScores:
    """What `score_masks` found. Shares lie between 0 and 1."""

    pixels: int  # that count
    accuracy: float  # of pixels
    mean_iou: float  # mean over the classes that are there or were predicted
    loss: float  # mean negative log-likelihood of a pixel, in nats
    per_class: tuple[MaskClassScores, ...]
    confusion: tuple[tuple[int, ...], ...]  # [K][K]: rows are the truth, columns the predictions

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def collect_masks(
    model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype = torch.float32, *,
    check: Callable[[], None] | None = None,
) -> MaskOutputs:  # fmt: skip
    """Runs the model in eval mode over a loader of masks. `check` is called after each batch and may raise to stop."""
    classes = loader.spec.num_classes
    confusion, loss = torch.zeros(classes, classes, dtype=torch.int64), 0.0
    samples: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    bad: list[tuple[str, str]] = []
    with evaluating(model):
        for batch in loader:
            logits, truth = model(loader.prepare(batch, device, dtype)), batch.labels.to(device)
            loss += F.cross_entropy(logits.double(), truth, ignore_index=IGNORED, reduction="sum").item()
            confusion += count_pixels(logits.argmax(1), truth, classes).cpu()
            samples.append(batch.samples)
            bad += batch.bad
            if check is not None:
                check()
    return MaskOutputs(confusion, loss, np.concatenate(samples), bad)


def join_masks(parts: Sequence[MaskOutputs]) -> MaskOutputs:
    """The outputs of several processes. No image may be counted twice."""
    samples = np.sort(np.concatenate([part.samples for part in parts]))
    if len(np.unique(samples)) != len(samples):
        raise ValueError("an image was evaluated by two processes")
    confusion = torch.stack([part.confusion for part in parts]).sum(0)
    return MaskOutputs(confusion, sum(p.loss for p in parts), samples, [entry for part in parts for entry in part.bad])


def count_pixels(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """The confusion matrix [K, K] of class indices [...]: how many pixels of class i were called j. 255 does not count."""
    counted = truth != IGNORED
    pairs = truth[counted] * num_classes + predicted[counted]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def mean_iou(confusion: Tensor) -> float:
    """The mean of IoU over the classes that are there or were predicted; 0 if no pixel counts."""
    hits, union = confusion.diagonal().double(), _union(confusion).double()
    found = union > 0
    return (hits[found] / union[found]).mean().item() if found.any() else 0.0


def score_masks(outputs: MaskOutputs, classes: Sequence[str]) -> MaskScores:
    """Scores of a split, from its sums; `classes` are the K names."""
    matrix = outputs.confusion
    if matrix.shape != (len(classes), len(classes)):
        raise ValueError(f"{len(classes)} classes need a matrix of as many rows, got shape {list(matrix.shape)}")
    pixels = int(matrix.sum())
    if pixels == 0:
        raise ValueError(f"no pixel to score: the masks hold nothing but {IGNORED}")
    hits, union = matrix.diagonal().tolist(), _union(matrix).tolist()
    there, predicted = matrix.sum(1).tolist(), matrix.sum(0).tolist()
    per_class = tuple(
        MaskClassScores(name, there[k], *(hits[k] / total[k] if total[k] else None for total in (union, predicted, there)))
        for k, name in enumerate(classes)
    )
    rows = tuple(tuple(row) for row in matrix.tolist())
    return MaskScores(pixels, sum(hits) / pixels, mean_iou(matrix), outputs.loss / pixels, per_class, rows)


def _union(confusion: Tensor) -> Tensor:
    return confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
