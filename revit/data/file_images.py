"""Splits whose images are files: read when they are asked for, or decoded once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from revit.data.image_files import ImageSource, printable, read_image, source_name
from revit.data.resize import crop_and_resize
from revit.data.spec import BadImage, Crop, Pixels

BRIGHTNESS = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in a grey value (ITU-R BT.601, as in Pillow)."""


@dataclass(frozen=True)
class Fit:
    """What each image of a dataset is brought to, whatever its file holds."""

    channels: int
    size: tuple[int, int]  # height, width
    floating: bool = False  # float32 for all, because some files have more than 8 bits
    centre: float = 1.0  # share of height and width that is looked at when no crop is given

    def takes(self, channels: int) -> bool:
        """Whether images of so many channels can be used: grey becomes colour by repetition, colour grey by its brightness."""
        return channels == self.channels or {channels, self.channels} == {1, 3}

    def read(self, source: ImageSource, crop: Crop | None = None) -> Pixels:
        """The image of a file, [C, H, W]."""
        return self.apply(read_image(source), source_name(source), crop)

    def apply(self, image: Pixels, name: str, crop: Crop | None = None) -> Pixels:
        """An image of any channels and size -> [C, H, W]. The name is for the error of one that cannot be used."""
        if not self.takes(len(image)):
            raise BadImage(f"{name}: {len(image)} channels among images of {self.channels}; convert or remove it")
        if len(image) < self.channels:
            image = image.repeat(self.channels, axis=0)
        elif len(image) > self.channels:
            grey = np.tensordot(BRIGHTNESS, image, axes=1)[None]
            image = np.rint(grey).astype(np.uint8) if image.dtype == np.uint8 else grey.astype(np.float32)
        if self.floating and image.dtype == np.uint8:
            image = image.astype(np.float32) / 255
        if not self.floating and image.dtype != np.uint8:
            raise BadImage(f"{name}: more than 8 bits among images of 8; convert or remove it")
        if crop is None:
            height, width = image.shape[1:]
            top, left = (int(side * (1 - self.centre) / 2) for side in (height, width))
            image = image[:, top : height - top, left : width - left]
        return crop_and_resize(image, self.size, crop)


class FileImages:
    """A split whose files are read each time."""

    def __init__(self, paths: Sequence[str], labels: NDArray[np.int64], fit: Fit) -> None:
        self.paths, self.labels, self.fit = paths, labels, fit

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return printable(self.paths[index])

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        return self.fit.read(self.paths[index], crop)


class KeptImages:
    """A split whose files were read once: images [N, C, H, W] in the size that the files have, so that crops lose nothing."""

    def __init__(self, paths: Sequence[str], labels: NDArray[np.int64], images: Pixels) -> None:
        self.paths, self.labels, self.images = paths, labels, images

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return printable(self.paths[index])

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        height, width = self.images.shape[2:]
        return np.array(crop_and_resize(self.images[index], (height, width), crop))  # a copy: the caller may change it

    def read_many(self, indices: NDArray[np.int64]) -> Pixels:
        """Several whole images at once, [B, C, H, W]."""
        return self.images[indices]
