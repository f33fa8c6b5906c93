"""How good predictions are: accuracy, loss, per class, calibration, ranking. From logits and labels, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

CALIBRATION_BINS = 15


@dataclass(frozen=True)
class ClassScores:
    """One class against all others. A quotient without a denominator is None: nothing was predicted, or nothing was there."""

    name: str
    support: int  # samples of this class
    precision: float | None  # None if it was never predicted
    recall: float | None  # None without samples
    f1: float | None  # None if it was neither there nor predicted
    auroc: float | None  # None without samples of this class, or of all others


@dataclass(frozen=True)
class CalibrationBin:
    """The samples whose confidence lies in [low, high); the last bin includes 1. Means are None where there is no sample."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scores:
    """What `score_predictions` found. Shares lie between 0 and 1."""

    samples: int
    accuracy: float
    balanced_accuracy: float  # mean recall of the classes that have samples
    loss: float  # mean negative log-likelihood, in nats
    auroc: float | None  # two classes: of the second; more: mean of each against the rest. None if a class has no samples
    calibration_error: float
    per_class: tuple[ClassScores, ...]
    confusion: tuple[tuple[int, ...], ...]  # [K][K]: rows are the truth, columns the predictions
    calibration: tuple[CalibrationBin, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def score_predictions(
    outputs: Tensor, labels: Tensor, classes: Sequence[str] | None = None, *, probabilities: bool = False
) -> Scores:
    """Scores of logits [N, K] (or of `probabilities`) for labels [N]; `classes` are the K names, by default their numbers.

    A probability of 0 for the true class counts as the smallest positive number, so that the loss stays finite.
    """
    outputs, labels = outputs.detach().cpu(), labels.detach().cpu().long()
    names = tuple(classes) if classes is not None else tuple(str(k) for k in range(outputs.shape[-1]))
    _check(outputs, labels, names, probabilities)
    # In float64, because float32 turns every confident prediction into exactly 1, and the ranking of those is lost.
    outputs = outputs.double()
    log_shares = outputs.clamp_min(torch.finfo(torch.float64).tiny).log() if probabilities else outputs.log_softmax(1)
    shares = outputs if probabilities else log_shares.exp()
    confidence, predicted = shares.max(1)

    matrix = _confusion(predicted, labels, len(names))
    areas = [_auroc(shares[:, k], labels == k) for k in range(len(names))]
    per_class = tuple(_class_scores(name, matrix, k, areas[k]) for k, name in enumerate(names))
    bins = _calibration_bins(confidence, predicted == labels)
    recalls = [scores.recall for scores in per_class if scores.recall is not None]
    return Scores(
        samples=len(labels),
        accuracy=int(matrix.trace()) / len(labels),
        # Not torchmetrics' macro accuracy, which counts a class that was predicted but never there as a recall of 0.
        balanced_accuracy=sum(recalls) / len(recalls),
        loss=-log_shares.gather(1, labels[:, None]).mean().item(),
        auroc=_mean_auroc(areas),
        calibration_error=expected_calibration_error(bins),
        per_class=per_class,
        confusion=tuple(tuple(row) for row in matrix.tolist()),
        calibration=bins,
    )


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """The mean distance between confidence and accuracy over the bins, weighted by their samples."""
    gaps = [(b.count, abs(b.accuracy - b.confidence)) for b in bins if b.accuracy is not None and b.confidence is not None]
    total = sum(count for count, _ in gaps)
    return sum(count * gap for count, gap in gaps) / total if total else 0.0


def _check(outputs: Tensor, labels: Tensor, names: tuple[str, ...], probabilities: bool) -> None:
    if outputs.ndim != 2 or labels.shape != outputs.shape[:1]:
        raise ValueError(f"expected outputs [N, K] and labels [N], got {list(outputs.shape)} and {list(labels.shape)}")
    count, width = outputs.shape
    if count == 0:
        raise ValueError("no samples to score")
    if width < 2 or len(names) != width:
        raise ValueError(f"outputs for {width} classes need as many names, and at least two; got {len(names)}")
    if labels.min() < 0 or labels.max() >= width:
        raise ValueError(f"labels of {width} classes lie in 0 to {width - 1}, got {labels.min()} to {labels.max()}")
    broken = (~torch.isfinite(outputs)).any(1).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"outputs of {len(broken)} samples are NaN or infinite, the first is sample {broken[0]}")
    if probabilities and (outputs.min() < 0 or (outputs.sum(1) - 1).abs().max() > 1e-3):
        raise ValueError("probabilities are 0 or more and sum to 1 in each row; for logits leave probabilities=False")


def _confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    return multiclass_confusion_matrix(predicted, labels, num_classes=num_classes)


def _auroc(shares: Tensor, positive: Tensor) -> float | None:
    """The area under the ROC curve of one class against the rest; None where one of the two is empty."""
    from torchmetrics.functional.classification import binary_auroc

    if positive.all() or not positive.any():
        return None
    return binary_auroc(shares, positive.long()).item()


def _mean_auroc(areas: Sequence[float | None]) -> float | None:
    """None if one is missing: a mean over fewer classes could not be compared with others."""
    known = [area for area in areas if area is not None]
    if len(known) < len(areas):
        return None
    return known[1] if len(known) == 2 else sum(known) / len(known)


def _class_scores(name: str, matrix: Tensor, k: int, auroc: float | None) -> ClassScores:
    hits, support, predicted = int(matrix[k, k]), int(matrix[k].sum()), int(matrix[:, k].sum())
    return ClassScores(
        name=name,
        support=support,
        precision=hits / predicted if predicted else None,
        recall=hits / support if support else None,
        f1=2 * hits / (support + predicted) if support + predicted else None,
        auroc=auroc,
    )


def _calibration_bins(confidence: Tensor, correct: Tensor) -> tuple[CalibrationBin, ...]:
    """Bins of equal width. Written out, as torchmetrics keeps its bins to itself and puts a confidence of 1 into one more."""
    places = (confidence * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    bins = []
    for place in range(CALIBRATION_BINS):
        inside = places == place
        count = int(inside.sum())
        bins.append(
            CalibrationBin(
                low=place / CALIBRATION_BINS,
                high=(place + 1) / CALIBRATION_BINS,
                count=count,
                confidence=confidence[inside].mean().item() if count else None,
                accuracy=correct[inside].double().mean().item() if count else None,
            )
        )
    return tuple(bins)
