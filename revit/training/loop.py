"""The training loop. It is given a model and loaders; it never builds a model or opens a dataset.

Everything random is a function of (seed, epoch, step or sample), so a run that was interrupted anywhere and resumed ends with
the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import copy
import math
import signal
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from revit.data.loader import Batch, EvalLoader, TrainLoader
from revit.data.randomness import key
from revit.evaluation.tasks import task_of
from revit.training.averaging import AveragedModel
from revit.training.bad_steps import MAX_BAD_STEPS, BadSteps, TrainingError
from revit.training.checkpoint import CheckpointError, has_checkpoint, read_latest, write_checkpoint
from revit.training.interrupt import Interrupted, StopRequest
from revit.training.optimizer import load_optimizer, make_optimizer, optimizer_tensors
from revit.training.progress import Progress, Watcher
from revit.training.recipe import TrainOptions
from revit.training.run_folder import RunError, RunFolder
from revit.training.schedule import learning_rate, momentum
from revit.training.sharding import load_whole, shard, take_first, whole, whole_tensors

RAW = "raw/"  # the weights themselves, where `model.safetensors` holds their average


@dataclass(frozen=True)
class Step:
    """What one optimiser step showed, over all processes."""

    loss: float  # sum over the images
    correct: float  # shares of right answers, added up
    images: int
    stop: bool  # some process was asked to
    save: bool  # it is time for a checkpoint


class Training:
    """One run: `run()` trains what is left of it and returns its progress.

    `config` is kept with the weights: what it takes to build the model and to read images for it. In a run of several processes
    each has its own `Training`, with loaders that read its share; the first one writes the files.
    """

    def __init__(
        self, model: nn.Module, train_loader: TrainLoader, val_loader: EvalLoader, options: TrainOptions, *,
        config: dict[str, Any], folder: RunFolder, accelerator: Accelerator, watchers: list[Watcher], stop: StopRequest,
    ) -> None:  # fmt: skip
        self.train_loader, self.val_loader, self.options = train_loader, val_loader, options
        self.config, self.folder, self.accelerator, self.watchers, self.stop = config, folder, accelerator, watchers, stop
        self.dtype = torch.float64 if options.precision == "float64" else torch.float32
        self.model = model.to(accelerator.device, self.dtype)
        if accelerator.num_processes > 1 and accelerator.device.type == "cuda":
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # the backends of other devices cannot
        if options.grad_checkpointing:
            _enable_grad_checkpointing(self.model)
        self.average = AveragedModel(self.model, options.ema) if options.ema else None
        self.sharded = options.sharding == "fsdp" and accelerator.num_processes > 1
        # A sharded model computes only if all processes do. Their shares of the validation images differ, so they need a copy.
        self.copy = copy.deepcopy(self.model) if self.sharded and not self.average else None
        if self.sharded:
            shard(self.model, accelerator.device, accelerator.num_processes)
        self.optimizer, self.task = make_optimizer(self.model, options), task_of(train_loader.spec)
        self.wrapped = self.model if self.sharded else accelerator.prepare_model(self.model)
        self.progress, self.saved_at = Progress(metric=self.task.metric), time.monotonic()
        kept = self.model.state_dict().keys()
        self.statistics = [buffer for name, buffer in self.model.named_buffers() if name in kept]  # of batch norms
        self.bad_steps, self.lost = BadSteps(folder, accelerator), False

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the average if there is one. Never a sharded one."""
        return self.average.module if self.average else self.copy or self.model

    @property
    def total_steps(self) -> int:
        return self.options.epochs * self.train_loader.steps

    def resume(self) -> None:
        """Goes back to where the last checkpoint was. A run that died before its first one begins again."""
        if not has_checkpoint(self.folder.last):
            return
        checkpoint = read_latest(self.folder.last)
        theirs, ours = (values.get("recipe", {}).get("model", {}) for values in (checkpoint.config, self.config))
        if any(theirs.get(name) != ours.get(name) for name in ("name", "group")):  # p2 and z2m have weights of the same shapes
            raise TrainingError(f"{checkpoint.path}: of another model or version ({theirs.get('name')} {theirs.get('group')})")
        try:
            self.evaluated.load_state_dict(checkpoint.model)
            raw = {name.removeprefix(RAW): t for name, t in checkpoint.trainer.items() if name.startswith(RAW)}
            load_whole(self.model, raw if self.average else checkpoint.model)
            load_optimizer(self.optimizer, self.model, checkpoint.trainer)
            self.progress = Progress(**checkpoint.state)
        except (RuntimeError, KeyError, TypeError) as error:
            raise TrainingError(f"{checkpoint.path}: of another model or version ({str(error).splitlines()[0]})") from error

    def run(self) -> Progress:
        """Trains the epochs that are left. `checkpoints/best` is the epoch that validation chooses."""
        for watcher in self.watchers:
            watcher.started(self.progress, self.train_loader.steps)
        if self.progress.epoch == self.progress.step == 0:
            self._save()  # a run that dies in its first steps can be resumed as well
        while self.progress.epoch < self.options.epochs and not self._stale():
            try:
                self._train_epoch()
                row = self._validate()
            except Interrupted:
                self._save()
                raise
            best = self.progress.finish_epoch(row)
            if best:
                self._save_best()
            self._save()
            for watcher in self.watchers:
                watcher.finished_epoch(row, best)
        return self.progress

    def _stale(self) -> bool:
        return 0 < self.options.early_stopping <= self.progress.stale_epochs

    def _train_epoch(self) -> None:
        progress = self.progress
        self.wrapped.train()
        batches = self.train_loader.batches(progress.epoch, progress.step)
        while progress.step < self.train_loader.steps:
            begin = time.perf_counter()
            parts = next(batches)
            waiting = time.perf_counter() - begin
            now = progress.epoch * self.train_loader.steps + progress.step
            lr = self._set_schedule(now)
            step = self._step(parts)
            if self.average and step.images:
                self.average.update(self.model, now)
            progress.add(step.loss, step.correct, step.images, time.perf_counter() - begin, waiting)
            bad = [entry for part in parts for entry in part.bad]
            for watcher in self.watchers:
                if step.images:
                    watcher.stepped(progress, step.loss / step.images, lr)
                if bad:
                    watcher.skipped(bad)
            if step.stop:
                raise Interrupted(self.stop.number or signal.SIGTERM)  # the request may have reached another process only
            if step.save and not progress.bad_steps:  # `last` stays before the first of several bad steps
                self._save()

    def _set_schedule(self, now: int) -> float:
        lr, beta1 = learning_rate(self.options, now, self.total_steps), momentum(self.options, now, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = lr, (beta1, 0.999)
        return lr

    def _step(self, parts: list[Batch]) -> Step:
        """One optimiser step. A loss or a gradient that is not a number never reaches the weights: the step is left out."""
        progress, accelerator = self.progress, self.accelerator
        torch.manual_seed(key(self.options.seed, progress.epoch, progress.step, accelerator.process_index, "dropout"))
        self.optimizer.zero_grad(set_to_none=True)
        before = [buffer.clone() for buffer in self.statistics]
        sums = torch.zeros(6, dtype=torch.float64, device=accelerator.device)  # loss, right, images, not a number, stop, save
        culprits: list[str] = []
        for i, part in enumerate(parts):
            images, targets = self.train_loader.prepare(part, progress.epoch, accelerator.device, self.dtype)
            self._check_pixels(images, part)
            with self._exchanged(i == len(parts) - 1), accelerator.autocast():
                logits = self.wrapped(images)
                losses = self.task.losses(logits, targets, label_smoothing=self.options.label_smoothing)
                # The mean over the batch of all processes: their gradients are averaged, hence the factor.
                accelerator.backward(losses.sum() * (accelerator.num_processes / part.planned))
            broken = ~torch.isfinite(losses.detach())
            culprits += self._names(part.samples[broken.cpu().numpy()])
            right = self.task.right(logits.detach(), targets)
            sums[:4] += torch.stack([t.double().sum() for t in (losses.detach(), right, torch.ones_like(right), broken)])
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip or math.inf))
        sums[3] += (~torch.isfinite(norm)).double()
        sums[4] = float(bool(self.stop))
        late = time.monotonic() - self.saved_at >= self.options.save_seconds
        sums[5] = float(late and accelerator.is_main_process)  # one clock for all
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums)
        loss, correct, images_seen, broken_losses, stop, save = sums.tolist()
        if broken_losses:
            for buffer, value in zip(self.statistics, before, strict=True):
                buffer.copy_(value)
            self._leave_out(culprits, parts)
            return Step(0.0, 0, 0, bool(stop), bool(save))
        progress.bad_steps = 0
        self.optimizer.step()
        if accelerator.num_processes > 1:
            take_first(self.statistics)  # what is averaged and validated is what is saved
        return Step(loss, correct, int(images_seen), bool(stop), bool(save))

    def _leave_out(self, culprits: list[str], parts: list[Batch]) -> None:
        batch = self._names(np.concatenate([part.samples for part in parts]))
        allowed = min(MAX_BAD_STEPS, self.train_loader.steps)  # no epoch is without a good step
        told = self.bad_steps.leave_out(self.progress, culprits, batch, allowed)
        for watcher in self.watchers:
            watcher.skipped([(batch[0], told)])

    def _check_pixels(self, images: Tensor, part: Batch) -> None:
        broken = ~torch.isfinite(images).flatten(1).all(1)
        if broken.any():
            names = self._names(part.samples[broken.cpu().numpy()])
            raise self.bad_steps.refuse(self.progress, names, self._names(part.samples))

    def _exchanged(self, last: bool) -> AbstractContextManager[Any]:
        """Processes exchange gradients once a step, with its last part."""
        if self.sharded:
            cast(FSDPModule, self.model).set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def _names(self, samples: NDArray[np.int64]) -> list[str]:
        return [self.train_loader.images.name(int(sample)) for sample in samples]

    def _validate(self) -> dict[str, Any]:
        if self.copy:
            self.copy.load_state_dict(whole_tensors(self.model.state_dict()))
        check = None if self.sharded else self.stop.check  # what processes save together, they stop together: after a step
        outputs = self.task.collect(self.evaluated, self.val_loader, self.accelerator.device, self.dtype, check=check)
        images = torch.tensor([len(outputs.samples)], dtype=torch.float64)
        sums = torch.cat((images, self.task.sums(outputs)))
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums.to(self.accelerator.device)).cpu()
        if outputs.bad:
            for watcher in self.watchers:
                watcher.skipped(outputs.bad)
        self.progress.val_images = int(sums[0])
        now = (self.progress.epoch + 1) * self.train_loader.steps - 1
        return self.progress.row(learning_rate(self.options, now, self.total_steps), self.task.measures(sums[1:]))

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if not (self.accelerator.is_main_process or self.sharded):
            return
        tensors, weights = optimizer_tensors(self.optimizer, self.model), whole_tensors(self.model.state_dict())
        if not self.accelerator.is_main_process:
            return
        if self.average:
            tensors |= {f"{RAW}{name}": tensor for name, tensor in weights.items()}
        elif self.copy:
            self.copy.load_state_dict(weights)
        self._write("last", tensors)
        with suppress(FileNotFoundError):  # it vanishes just now
            self.folder.write_results(self.progress.history)
        if self.folder.vanished():
            self.lost = True
            self._write("last", tensors)
            self.folder.write_results(self.progress.history)
        if self.lost:
            raise RunError(
                f"{self.folder.path}: vanished while the run was using it; made anew with the state of epoch"
                f" {self.progress.epoch + 1}, step {self.progress.step}: --resume goes on. Earlier checkpoints are lost"
            )

    def _save_best(self) -> None:
        if self.accelerator.is_main_process:
            self._write("best", {})

    def _write(self, which: str, tensors: dict[str, Tensor]) -> None:
        folder = self.folder.last if which == "last" else self.folder.best
        contents = {"model": self.evaluated.state_dict(), "config": self.config, "trainer": tensors}
        self.lost |= self.folder.vanished()
        try:
            write_checkpoint(folder, **contents, state=asdict(self.progress))
        except CheckpointError:
            if not self.folder.vanished():
                raise
            self.lost = True  # in the middle of the save
            write_checkpoint(folder, **contents, state=asdict(self.progress))


def _enable_grad_checkpointing(model: nn.Module) -> None:
    enable = getattr(model, "set_grad_checkpointing", None)
    if enable is None:
        raise TrainingError(f"{type(model).__name__} has no gradient checkpointing; leave out --train.grad_checkpointing")
    enable()
