"""What a dataset is: a description, and three splits of images that are kept apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[Any]
"""One image [C, H, W] or several [N, C, H, W]: uint8, or float32 with 0 as black and 1 as white."""

MAX_PIXELS = 64_000_000
"""Images larger than this are refused before they are decoded: no photo of ours needs more, an image bomb does."""


IGNORED = 255
"""What a mask holds at pixels that do not count."""

TASKS = ("classification", "segmentation")
"""What is asked of an image: its class, or the class of each of its pixels."""


MAX_BAD = 0.01
"""Share of the images that `on_bad="skip"` goes on without: more are no accident."""


class DataError(ValueError):
    """A file or folder that cannot be used. The message names it and says what to do."""


class BadImage(DataError):
    """One image that cannot be read, among others that can: `on_bad="skip"` goes on without it."""


@dataclass(frozen=True)
class DataSpec:
    """The typed description of a dataset: what a model must know to read its images."""

    name: str
    channels: int
    size: tuple[int, int]  # height, width
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of values between 0 and 1
    std: tuple[float, ...]
    source: str  # where the images came from, as results state it: "official archive", "rebuilt from mnist.npz, seed 0"
    centre: float = 1.0  # share of height and width of a file that evaluation looks at
    task: str = "classification"  # or segmentation

    def __post_init__(self) -> None:
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise DataError(f"{self.name}: {self.channels} channels need as many means and deviations")
        if not all(math.isfinite(m) for m in self.mean) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise DataError(f"{self.name}: means must be finite and deviations above 0, got {self.mean} and {self.std}")
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise DataError(f"{self.name}: at least two classes with different names are needed, got {', '.join(self.classes)}")
        if not 0 < self.centre <= 1:
            raise DataError(f"{self.name}: centre is a share above 0 and at most 1, got {self.centre}")
        if self.task not in TASKS:
            raise DataError(f"{self.name}: unknown task {self.task!r}; choose {', '.join(TASKS)}")
        if self.channels < 1 or min(self.size) < 1:
            raise DataError(f"{self.name}: no image has {self.channels} channels and size {self.size}")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. What is classified does not say so, as before there was another task."""
        values = asdict(self)
        return values if self.task != TASKS[0] else {name: value for name, value in values.items() if name != "task"}

    @classmethod
    def from_dict(cls, values: Any) -> DataSpec:
        """The inverse of `to_dict`, for values that came from a file."""
        try:
            return cls(
                name=str(values["name"]),
                channels=int(values["channels"]),
                size=(int(values["size"][0]), int(values["size"][1])),
                classes=tuple(str(name) for name in values["classes"]),
                mean=tuple(float(m) for m in values["mean"]),
                std=tuple(float(s) for s in values["std"]),
                source=str(values["source"]),
                centre=float(values["centre"]),
                task=str(values.get("task", TASKS[0])),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(f"not the description of a dataset: {error!r}") from error


@dataclass(frozen=True)
class Crop:
    """A random part of an image, as four numbers between 0 and 1: how large, how wide, and where (height, width)."""

    area: float
    aspect: float
    top: float
    left: float
    scale: tuple[float, float] = (0.08, 1.0)  # share of the area that is kept, smallest and largest
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width in pixels of an image of this size."""
        share = self.scale[0] + self.area * (self.scale[1] - self.scale[0])
        log_low, log_high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = math.exp(log_low + self.aspect * (log_high - log_low))
        tall = min(height, max(1, round(math.sqrt(share * height * width / aspect))))
        wide = min(width, max(1, round(math.sqrt(share * height * width * aspect))))
        return round(self.top * (height - tall)), round(self.left * (width - wide)), tall, wide


class Images(Protocol):
    """One split: images of one size with their labels."""

    labels: NDArray[np.int64]  # [N], indices of `DataSpec.classes`

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What a person would look for: the path of a file, or "rotmnist/train/17"."""
        ...

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        """One image [C, H, W] in the size of the description; a crop is cut out first. Raises `BadImage`."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A description and its splits. Training reads `train`, model selection `val`, and `test` is read once, at the end."""

    spec: DataSpec
    train: Images
    val: Images
    test: Images
    skipped: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)  # files that cannot be read: name and reason

    def split(self, name: str) -> Images:
        if name not in ("train", "val", "test"):
            raise DataError(f"unknown split {name!r}; choose train, val or test")
        return {"train": self.train, "val": self.val, "test": self.test}[name]


@dataclass
class DataOptions:
    """Which images, from where, and how they are read.

    Args:
        name: Dataset: rotmnist5k, rotmnist, cifar10, pcam, arrays, folder, masks, shards, imagenet or photos.
        root: Folder with the data (also --data-root, or the variable REVIT_DATA).
        file: One file below the root instead of the usual names: an .npz archive, or the CSV manifest of a folder.
        size: Side of the square that images of a folder are resized to (default: their own size, if all have one, up to 224).
        val_fraction: Share of the training images held out for model selection where the data has no such part.
        test_fraction: Share held out for the test where the data has no such part.
        split_seed: Seed of these splits.
        on_bad: What to do with an image that cannot be read: stop, or skip it and report.
        max_bad: Share of the images that may be skipped; more stop the run.
        download: Fetch the official files if they are missing.
        workers: Processes that read image files ahead; 0 reads in the training process.
        memory_gb: Folders whose images fit into this much memory are decoded once and kept.
    """

    name: str = "rotmnist5k"
    root: str | None = None
    file: str | None = None
    size: int | None = None
    val_fraction: float = 0.1
    test_fraction: float = 0.2
    split_seed: int = 0
    on_bad: str = "stop"
    max_bad: float = MAX_BAD
    download: bool = False
    workers: int = 0
    memory_gb: float = 2.0

    def __post_init__(self) -> None:
        if self.on_bad not in ("stop", "skip"):
            raise DataError(f"on_bad must be stop or skip, got {self.on_bad!r}")
        if not 0 <= self.max_bad <= 1:
            raise DataError(f"max_bad is a share between 0 and 1, got {self.max_bad}")
        for option in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, option) < 1:
                raise DataError(f"{option} must lie between 0 and 1, got {getattr(self, option)}")
        if self.val_fraction + self.test_fraction >= 1:
            raise DataError("val_fraction and test_fraction leave nothing to train on")
        if self.size is not None and self.size < 1:
            raise DataError(f"size must be at least 1 pixel, got {self.size}")
        if self.workers < 0:
            raise DataError(f"workers must be 0 or more, got {self.workers}")


def too_many_bad(bad: int, images: int, max_bad: float, first: str) -> DataError:
    return DataError(
        f"{bad} of {images} images cannot be read, more than the {max_bad:.3g} of them that may be skipped; the first: {first}."
        " Mend or remove them, or raise --data.max_bad"
    )


def stratified_split(
    labels: Sequence[int] | NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (kept, held out): of every class the same fraction is held out, at least one image if the class has two."""
    labels = np.asarray(labels, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(seed))
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        held[generator.permutation(members)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
