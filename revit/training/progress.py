"""How far a run is, and who is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Progress:
    """Everything about a run that is not a tensor, as `trainer.json` keeps it."""

    epoch: int = 0
    step: int = 0  # in the epoch
    loss: float = 0.0  # sums over the epoch so far
    correct: int = 0
    images: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # of these seconds, for data
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of `results.csv`

    @property
    def best(self) -> dict[str, Any]:
        """The row of the best epoch so far: by validation accuracy, then by loss, then the earliest."""
        return max(self.history, key=lambda row: (row["val_accuracy"], -row["val_loss"], -row["epoch"]))

    @property
    def stale_epochs(self) -> int:
        """Epochs since the best one."""
        return self.epoch - self.best["epoch"] if self.history else 0

    def add(self, loss: float, correct: int, images: int, seconds: float, waiting: float) -> None:
        """One step more."""
        self.step += 1
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images
        self.seconds, self.waiting = self.seconds + seconds, self.waiting + waiting

    def row(self, lr: float, val_loss: float, val_accuracy: float) -> dict[str, Any]:
        """The line of `results.csv` for the epoch that has just been trained. Epochs are counted from 1 there."""
        return {
            "epoch": self.epoch + 1,
            "train_loss": self.loss / self.images,
            "train_accuracy": self.correct / self.images,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "lr": lr,
            "images_per_second": round(self.images / self.seconds, 1),
            "waiting_for_data": round(self.waiting / self.seconds, 4),
            "seconds": round(self.seconds, 2),
        }

    def finish_epoch(self, row: dict[str, Any]) -> bool:
        """Puts the epoch into the history; tells whether it is the best one."""
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
