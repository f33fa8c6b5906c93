"""Who watches a run: a line on the terminal that moves, lines in a log file that do not, TensorBoard."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from revit.training.progress import Progress


class Terminal:
    """Epoch, loss, accuracy, images a second and time left; one line for each epoch stays."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console, self.epochs = console, epochs
        self.bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]:.1%}  {task.fields[speed]:.0f} images/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.skipped_count, self.first_epoch = 0, 0

    def started(self, progress: Progress, steps: int) -> None:
        self.first_epoch = progress.epoch
        if progress.epoch or progress.step:
            self.console.print(
                f"resuming in epoch {min(progress.epoch + 1, self.epochs)}, after step {progress.step} of {steps}"
            )
        done = progress.epoch * steps + progress.step
        epoch = min(progress.epoch + 1, self.epochs)
        self.task = self.bar.add_task(
            "", total=self.epochs * steps, completed=done, epoch=epoch, loss=0.0, accuracy=0.0, speed=0.0
        )
        self.bar.start()
        self.begin = time.monotonic()

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        images = progress.images
        self.bar.update(
            self.task, advance=1, epoch=progress.epoch + 1, loss=progress.loss / images, accuracy=progress.correct / images,
            speed=images / max(progress.seconds, 1e-9),
        )  # fmt: skip

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        iou = f"  mean IoU {row['val_mean_iou']:6.2%}" if "val_mean_iou" in row else ""
        left = (time.monotonic() - self.begin) / (row["epoch"] - self.first_epoch) * (self.epochs - row["epoch"])
        self.console.print(
            f"epoch {row['epoch']:>{len(str(self.epochs))}}/{self.epochs}"
            f"  train loss {row['train_loss']:.4f}  accuracy {row['train_accuracy']:6.2%}"
            f"  validation loss {row['val_loss']:.4f}  accuracy {row['val_accuracy']:6.2%}{iou}{' *' if best else '  '}"
            f" {row['images_per_second']:.0f} images/s  {left:.0f} s left",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def skipped(self, bad: list[tuple[str, str]]) -> None:
        for _, reason in bad[: max(0, 10 - self.skipped_count)]:
            self.console.print(f"skipped: {reason}", highlight=False, markup=False, soft_wrap=True)
        self.skipped_count += len(bad)

    def close(self) -> None:
        self.bar.stop()


class TensorBoard:
    """Loss and learning rate by step, accuracies by epoch, under `tb/`."""

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.folder, self.every = folder, every

    def started(self, progress: Progress, steps: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own dependencies
            from torch.utils.tensorboard import SummaryWriter

        self.steps = steps
        # What a killed run wrote after its last checkpoint is written again: the page forgets it.
        done = progress.epoch * steps + progress.step
        self.writer = SummaryWriter(str(self.folder), purge_step=done or None)

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        now = progress.epoch * self.steps + progress.step
        if now % self.every == 0:
            self.writer.add_scalar("train/loss", loss, now)
            self.writer.add_scalar("train/lr", lr, now)

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        now = row["epoch"] * self.steps
        for name in (name for name in row if name.startswith(("train_", "val_", "images_"))):
            self.writer.add_scalar(f"epoch/{name}", row[name], now)
        self.writer.flush()

    def skipped(self, bad: list[tuple[str, str]]) -> None:
        pass

    def close(self) -> None:
        if hasattr(self, "writer"):  # a run may fail before it starts
            self.writer.close()
