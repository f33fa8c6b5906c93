"""Batches in an order that is a pure function of (seed, epoch), shared out over processes and read ahead by workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import get_worker_info

from revit.data.augment import AugmentOptions, augment, augment_masks, crops, mix, partners
from revit.data.randomness import block_permutation, permutation
from revit.data.spec import MAX_BAD, BadImage, Crop, DataError, DataSpec, Images, Pixels, too_many_bad
from revit.data.workers import Watch, read_ahead


@dataclass(frozen=True)
class Share:
    """The part of each batch that this process has: process `rank` of `world`."""

    rank: int = 0
    world: int = 1

    def of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array_split(samples, self.world)[self.rank]


@dataclass(frozen=True)
class Reading:
    """How images are read: by whom, by how many worker processes, and what happens with one that cannot be read."""

    share: Share = Share()
    workers: int = 0
    on_bad: str = "stop"
    max_bad: float = MAX_BAD  # share of the images that may be skipped


@dataclass
class Batch:
    """Images as they were read, before they go to the device."""

    images: Tensor  # [B, C, H, W], uint8 or float32
    labels: Tensor  # [B], or masks [B, H, W]
    samples: NDArray[np.int64]  # [B], numbers in the split
    planned: int  # images that all processes together should have had, bad ones included
    other: Tensor | None = None  # what each image is mixed with
    other_labels: Tensor | None = None
    bad: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of images that were skipped
    error: str | None = None  # of an image that cannot be read, when that stops the run


def blocks_of(images: Images) -> NDArray[np.int64]:
    """Where the blocks of samples begin that lie together, and the number of samples: archives say so, all others are one."""
    return np.asarray(getattr(images, "blocks", [0, len(images)]), dtype=np.int64)


def epoch_batches(images: Images, batch_size: int, *purpose: int | str) -> list[NDArray[np.int64]]:
    """All samples in the random order of this purpose, in batches of nearly equal size: none is tiny, none is lost.

    Samples in archives come from few archives at a time, so that a set larger than the memory is read as a stream.
    """
    blocks = blocks_of(images)
    order = block_permutation(blocks, *purpose) if len(blocks) > 2 else permutation(len(images), *purpose)
    return np.array_split(order, max(1, -(-len(order) // batch_size)))


class TrainLoader:
    """The training images, epoch by epoch. `batches(epoch, start)` begins anywhere and gives what the whole epoch gives there.

    `batch_size` counts the images of one optimiser step over all processes. Each step's batch is read in `parts` pieces, for
    gradient accumulation.
    """

    def __init__(
        self, images: Images, spec: DataSpec, *, batch_size: int, seed: int = 0, augment: AugmentOptions | None = None,
        parts: int = 1, reading: Reading | None = None,
    ) -> None:  # fmt: skip
        self.images, self.spec, self.seed, self.parts = images, spec, seed, parts
        self.augment_options, self.reading = augment or AugmentOptions(), reading or Reading()
        self.batch_size = min(batch_size, len(images))
        self.bad: set[str] = set()  # the names of all images that were skipped so far
        if spec.task == "segmentation" and self.augment_options.mixes:
            raise DataError("mixup and cutmix mix the classes of whole images; masks need --augment.mixup 0 --augment.cutmix 0")
        world = self.reading.share.world
        if len(images) // self.steps < world * parts:
            raise DataError(
                f"{len(images)} training images in batches of {batch_size} cannot be shared by {world} processes"
                f" in {parts} parts each; raise the batch size or lower the others"
            )

    @property
    def steps(self) -> int:
        """Optimiser steps in an epoch."""
        return max(1, -(-len(self.images) // self.batch_size))

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The batches of an epoch from step `start` on, each as the list of its parts."""
        plan = []
        for step in epoch_batches(self.images, self.batch_size, self.seed, epoch, "order")[start:]:
            plan += [(part, len(step)) for part in np.array_split(self.reading.share.of(step), self.parts)]
        loader = _batches(_Reader(self.images, plan, self.augment_options, self.seed, epoch, self.reading), self.bad)
        for _ in range(len(plan) // self.parts):
            yield [next(loader) for _ in range(self.parts)]

    def prepare(self, batch: Batch, epoch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Normalised, augmented images [B, C, H, W] and targets [B, K], or masks [B, H, W] moved alike, on the device."""
        options, samples, seed = self.augment_options, batch.samples, self.seed
        images = augment(scaled(batch.images, device, dtype), options, samples, seed, epoch)
        if self.spec.task == "segmentation":
            return normalised(images, self.spec), augment_masks(batch.labels.to(device), options, samples, seed, epoch)
        targets = torch.nn.functional.one_hot(batch.labels.to(device), self.spec.num_classes).to(dtype)
        if batch.other is not None and batch.other_labels is not None:
            other = augment(scaled(batch.other, device, dtype), options, samples, seed, epoch)
            other_targets = torch.nn.functional.one_hot(batch.other_labels.to(device), self.spec.num_classes).to(dtype)
            images, targets = mix(images, other, targets, other_targets, options, samples, seed, epoch)
        return normalised(images, self.spec), targets


class EvalLoader:
    """The images of a split in their order, each in one process only, not augmented."""

    def __init__(self, images: Images, spec: DataSpec, *, batch_size: int, reading: Reading | None = None) -> None:
        self.images, self.spec, self.batch_size, self.reading = images, spec, batch_size, reading or Reading()

    def __iter__(self) -> Iterator[Batch]:
        mine = self.reading.share.of(np.arange(len(self.images)))
        plan = [(mine[i : i + self.batch_size], self.batch_size) for i in range(0, len(mine), self.batch_size)]
        return _batches(_Reader(self.images, plan, AugmentOptions(), 0, 0, self.reading), set())

    def prepare(self, batch: Batch, device: torch.device, dtype: torch.dtype) -> Tensor:
        return normalised(scaled(batch.images, device, dtype), self.spec)


def scaled(images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Pixels on the device, between 0 and 1."""
    moved = images.to(device, non_blocking=True)
    return moved.to(dtype) / 255 if images.dtype == torch.uint8 else moved.to(dtype)


def normalised(images: Tensor, spec: DataSpec) -> Tensor:
    """Each channel with the mean 0 and the deviation 1 of the training images."""
    mean = torch.tensor(spec.mean, device=images.device, dtype=images.dtype)[:, None, None]
    std = torch.tensor(spec.std, device=images.device, dtype=images.dtype)[:, None, None]
    return (images - mean) / std


class _Reader(TorchDataset[Batch]):
    """Reads whole batches of a plan, so that a worker's unit of work is a batch."""

    def __init__(
        self,
        images: Images,
        plan: list[tuple[NDArray[np.int64], int]],
        options: AugmentOptions,
        seed: int,
        epoch: int,
        reading: Reading,
    ) -> None:
        self.images, self.plan, self.options = images, plan, options
        self.seed, self.epoch, self.reading, self.watch = seed, epoch, reading, Watch(reading.workers)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        samples, planned = self.plan[index]
        boxes = crops(self.options, samples, self.seed, self.epoch)
        bad: list[tuple[str, str]] = []
        try:
            pixels, masks, kept = self._read(samples, boxes, bad)
            labels = self._labels(samples[kept]) if masks is None else _stack(masks).long()
            batch = Batch(_stack(pixels), labels, samples[kept], planned, bad=bad)
            if self.options.mixes:
                others = partners(batch.samples, blocks_of(self.images), self.seed, self.epoch)
                batch.other, batch.other_labels = self._partners(batch, others, boxes and [boxes[i] for i in kept], bad)
        except DataError as error:  # a worker's exception would arrive with its traceback as text; an error travels as a value
            return Batch(torch.empty(0), torch.empty(0), samples, planned, error=str(error))
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = f"{self.images.name(self.watch.here)}: reading it failed ({what}); look at this file"
            if get_worker_info() is None:
                raise DataError(message) from error
            return Batch(torch.empty(0), torch.empty(0), samples, planned, error=message)
        self.watch.reads(-1)
        return batch

    def _read(
        self, samples: NDArray[np.int64], boxes: list[Crop] | None, bad: list[tuple[str, str]]
    ) -> tuple[Pixels | list[Pixels], list[Pixels] | None, list[int]]:
        """Images, their masks if they have some, and which of the samples they are."""
        read_many, read_masked = (getattr(self.images, name, None) for name in ("read_many", "read_masked"))
        self.watch.reads(int(samples[0]))
        if read_many is not None and boxes is None:
            return read_many(samples), None, list(range(len(samples)))
        pixels, masks, kept = [], [], []
        for i, sample in enumerate(samples):
            self.watch.reads(int(sample))
            try:
                box = boxes[i] if boxes else None
                if read_masked is None:
                    pixels.append(self.images.read(int(sample), box))
                else:
                    image, mask = read_masked(int(sample), box)
                    pixels.append(image)
                    masks.append(mask)
                kept.append(i)
            except BadImage as error:
                if self.reading.on_bad == "stop":
                    raise
                bad.append((self.images.name(int(sample)), str(error)))
        if not kept:
            raise DataError(f"none of the {len(samples)} images of a batch can be read; the first: {bad[0][1]}")
        return pixels, masks if read_masked is not None else None, kept

    def _partners(
        self, batch: Batch, others: NDArray[np.int64], boxes: list[Crop] | None, bad: list[tuple[str, str]]
    ) -> tuple[Tensor, Tensor]:
        """The images to mix with; an image whose partner is bad stays alone."""
        pixels, _, kept = self._read(others, boxes, bad)
        if len(kept) == len(others):
            return _stack(pixels), self._labels(others)
        images, labels = batch.images.clone(), batch.labels.clone()
        images[kept], labels[kept] = _stack(pixels), self._labels(others[kept])
        return images, labels

    def _labels(self, samples: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.images.labels[samples])


def _stack(pixels: Pixels | list[Pixels]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.stack(pixels) if isinstance(pixels, list) else pixels))


def _batches(reader: _Reader, bad: set[str]) -> Iterator[Batch]:
    """The batches of a plan in their order. `bad` collects the names of images that are skipped; too many are an error."""
    images, reading = reader.images, reader.reading
    for batch in read_ahead(reader, len(reader), reading.workers, reader.watch, images.name):
        if batch.error is not None:
            raise DataError(batch.error)
        bad |= {name for name, _ in batch.bad}
        if len(bad) > reading.max_bad * len(images):
            raise too_many_bad(len(bad), len(images), reading.max_bad, batch.bad[0][1])
        yield batch
