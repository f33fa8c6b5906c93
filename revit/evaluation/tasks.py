"""What is asked of an image, and how answers are compared with the truth: the part of training and evaluation that differs
between a class for the image and a class for each of its pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.data.loader import EvalLoader
from revit.data.spec import IGNORED, DataSpec
from revit.evaluation.collect import Outputs, collect_logits, join_outputs
from revit.evaluation.segmentation import MaskOutputs, collect_masks, join_masks, mean_iou


class Task(Protocol):
    """Losses and shares of right answers are per image, so that a bad one can be named; what is collected adds up."""

    metric: str  # what chooses the epoch, as a measure of the validation images

    def losses(self, logits: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
        """The loss of each image, [B], of what a training loader prepares."""
        ...

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of right answers of each image, [B]."""
        ...

    def collect(
        self, model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype, *,
        check: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """The answers for a split, or what is needed of them."""
        ...

    def join(self, parts: Sequence[Any]) -> Any:
        """The answers that several processes collected."""
        ...

    def sums(self, outputs: Any) -> Tensor:
        """Numbers that add up over processes, float64."""
        ...

    def measures(self, sums: Tensor) -> dict[str, float]:
        """From sums over all processes: `loss`, `accuracy`, and the metric."""
        ...


class Classification:
    """A class for each image; targets are shares of the classes, [B, K]."""

    metric = "accuracy"

    def losses(self, logits: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.argmax(1) == targets.argmax(1)

    def collect(
        self, model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype, *,
        check: Callable[[], None] | None = None,
    ) -> Outputs:  # fmt: skip
        return collect_logits(model, loader, device, dtype, check=check)

    def join(self, parts: Sequence[Outputs]) -> Outputs:
        return join_outputs(parts)

    def sums(self, outputs: Outputs) -> Tensor:
        losses = F.cross_entropy(outputs.logits.double(), outputs.labels, reduction="sum")
        right = (outputs.logits.argmax(1) == outputs.labels).double().sum()
        return torch.stack([losses, right, torch.tensor(float(len(outputs.labels)), dtype=torch.float64)])

    def measures(self, sums: Tensor) -> dict[str, float]:
        loss, right, images = sums.tolist()
        return {"loss": loss / images, "accuracy": right / images}


class Segmentation:
    """A class for each pixel; targets are masks [B, H, W], in which 255 does not count. An image counts as much as another,
    however many of its pixels do."""

    metric = "mean_iou"

    def losses(self, logits: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": IGNORED, "reduction": "none"}
        return _mean_of_counted(F.cross_entropy(logits, targets, **options), targets)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _mean_of_counted((logits.argmax(1) == targets).double(), targets)

    def collect(
        self, model: nn.Module, loader: EvalLoader, device: torch.device, dtype: torch.dtype, *,
        check: Callable[[], None] | None = None,
    ) -> MaskOutputs:  # fmt: skip
        return collect_masks(model, loader, device, dtype, check=check)

    def join(self, parts: Sequence[MaskOutputs]) -> MaskOutputs:
        return join_masks(parts)

    def sums(self, outputs: MaskOutputs) -> Tensor:
        return torch.cat((torch.tensor([outputs.loss], dtype=torch.float64), outputs.confusion.double().flatten()))

    def measures(self, sums: Tensor) -> dict[str, float]:
        side = round((len(sums) - 1) ** 0.5)
        matrix = sums[1:].view(side, side)
        pixels = max(1.0, matrix.sum().item())
        return {
            "loss": sums[0].item() / pixels,
            "accuracy": matrix.trace().item() / pixels,
            "mean_iou": mean_iou(matrix),
        }


def _mean_of_counted(values: Tensor, masks: Tensor) -> Tensor:
    """[B, H, W] -> [B]: the mean over the pixels that count; 0 where none does."""
    counted = masks != IGNORED
    return (values * counted).sum((1, 2)) / counted.sum((1, 2)).clamp_min(1)


TASKS: dict[str, Task] = {"classification": Classification(), "segmentation": Segmentation()}


def task_of(spec: DataSpec) -> Task:
    """The task that a dataset is for."""
    return TASKS[spec.task]
