"""How far a run is, and who is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Progress:
    """Everything about a run that is not a tensor, as `trainer.json` keeps it."""

    epoch: int = 0
    step: int = 0  # in the epoch
    loss: float = 0.0  # sums over the epoch so far
    correct: float = 0  # shares of right answers, added up
    images: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # of these seconds, for data
    val_images: int = 0
    metric: str = "accuracy"  # what chooses the epoch, as a measure of the validation images
    bad_steps: int = 0  # the latest ones, in a row, whose loss was no number
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of `results.csv`

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch to keep: the latest whose validation accuracy is within one standard error of the highest; of
        another metric the highest.

        Differences below that error are chance. Among epochs that validation cannot tell apart, the one that was trained
        longest, at the smallest learning rate, is the safer choice; the highest of many chance values is not.
        """
        if self.metric != "accuracy":
            return self._highest
        top = self._highest["val_accuracy"]
        error = math.sqrt(top * (1 - top) / max(1, self.val_images))
        return [row for row in self.history if row["val_accuracy"] >= top - error][-1]

    @property
    def _highest(self) -> dict[str, Any]:
        return max(self.history, key=lambda row: row[f"val_{self.metric}"])  # the first of equals

    @property
    def stale_epochs(self) -> int:
        """Epochs since the highest validation accuracy, or other metric."""
        return self.epoch - self._highest["epoch"] if self.history else 0

    def add(self, loss: float, correct: float, images: int, seconds: float, waiting: float) -> None:
        """One step more."""
        self.step += 1
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images
        self.seconds, self.waiting = self.seconds + seconds, self.waiting + waiting

    def row(self, lr: float, measures: dict[str, float]) -> dict[str, Any]:
        """The line of `results.csv` for the epoch that has just been trained. Epochs are counted from 1 there."""
        return {
            "epoch": self.epoch + 1,
            "train_loss": self.loss / self.images,
            "train_accuracy": self.correct / self.images,
            **{f"val_{name}": value for name, value in measures.items()},
            "lr": lr,
            "images_per_second": round(self.images / self.seconds, 1),
            "waiting_for_data": round(self.waiting / self.seconds, 4),
            "seconds": round(self.seconds, 2),
        }

    def finish_epoch(self, row: dict[str, Any]) -> bool:
        """Puts the epoch into the history; tells whether it is the one to keep."""
        self.history.append(row)
        self.epoch, self.step = self.epoch + 1, 0
        self.loss, self.correct, self.images, self.seconds, self.waiting = 0.0, 0, 0, 0.0, 0.0
        return self.best is row


class Watcher(Protocol):
    """Who is told how a run goes: the terminal, TensorBoard."""

    def started(self, progress: Progress, steps: int) -> None: ...

    def stepped(self, progress: Progress, loss: float, lr: float) -> None: ...

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None: ...

    def skipped(self, bad: list[tuple[str, str]]) -> None: ...

    def close(self) -> None: ...
