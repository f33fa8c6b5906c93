"""Who watches a run: a line on the terminal that moves, lines in a log file that do not, TensorBoard."""

from __future__ import annotations

import os
import platform
import time
import warnings
from pathlib import Path
from typing import IO, Any

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
    """Loss and learning rate by step, accuracies by epoch, in an event file under `tb/`.

    The file stays open: the writer that torch offers opens it anew by its name, on a thread of its own, and a run whose folder
    is moved would end in that thread's traceback before its state can be saved.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.folder, self.every = folder, every
        self.file: IO[bytes] | None = None

    def started(self, progress: Progress, steps: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own dependencies
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard.summary import scalar

        self.steps, self.event, self.scalar = steps, Event, scalar
        self.folder.mkdir(parents=True, exist_ok=True)
        begin = f"events.out.tfevents.{time.time():010.0f}.{platform.node()}.{os.getpid()}"
        taken = len(list(self.folder.glob(f"{begin}.*")))
        self.file = open(self.folder / f"{begin}.{taken}", "xb")  # noqa: SIM115 (open as long as the run lasts)
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        done = progress.epoch * steps + progress.step
        if done:  # what a killed run wrote after its last checkpoint is written again: the page forgets it
            self._write(step=done + 1, session_log=SessionLog(status=SessionLog.START))

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        now = progress.epoch * self.steps + progress.step
        if now % self.every == 0:
            self._write(step=now, summary=self.scalar("train/loss", loss))
            self._write(step=now, summary=self.scalar("train/lr", lr))

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        for name in (name for name in row if name.startswith(("train_", "val_", "images_"))):
            self._write(step=row["epoch"] * self.steps, summary=self.scalar(f"epoch/{name}", row[name]))
        self.records.flush()

    def _write(self, **event: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **event).SerializeToString())

    def skipped(self, bad: list[tuple[str, str]]) -> None:
        pass

    def close(self) -> None:
        if self.file is not None:  # a run may fail before it starts
            self.file.close()
