"""Augmentation of a batch on its device, each image by random numbers of its own.

Turning, mirroring and shifting are one affine map, so an image is resampled once. Nothing here is used by audits: those move
pixels by permutation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revit.data.randomness import key, uniforms
from revit.data.spec import IGNORED, Crop

FILLS = ("zeros", "border", "reflection")
INTERPOLATIONS = ("bilinear", "bicubic")
_GEOMETRY, _COLOUR, _CROP, _MIX = "geometry", "colour", "crop", "mix"


@dataclass
class AugmentOptions:
    """Random changes of the training images. All off by default.

    Args:
        rotate: Largest angle in degrees, to both sides; 180 turns by any angle.
        rotate_step: Turn by multiples of this many degrees only; 0 for any angle.
        shift: Largest shift in pixels along each axis (a random crop of an image padded by as much).
        flip: Mirror left to right, half of the time.
        flip_vertical: Mirror top to bottom, half of the time.
        crop_scale: Cut out a part of at least this share of the area and resize it (random resized crop); 0 for none.
        brightness: Largest relative change of brightness.
        contrast: Largest relative change of contrast.
        saturation: Largest relative change of saturation (RGB images).
        hue: Largest turn of the colour circle, in turns (RGB images), at most 0.5.
        mixup: Parameter of the beta distribution of mixup; 0 for none.
        cutmix: Parameter of the beta distribution of cutmix; 0 for none. With mixup too, each gets half of the images.
        fill: What moves in from outside: zeros (black), border or reflection.
        interpolation: Of images that are turned: bilinear, or bicubic, which blurs less (images that were turned before are
            turned again, those of the test are not).
    """

    rotate: float = 0.0
    rotate_step: float = 0.0
    shift: int = 0
    flip: bool = False
    flip_vertical: bool = False
    crop_scale: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    fill: str = "zeros"
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"augment.{name} must be 0 or more, got {value}")
        for name in ("brightness", "contrast", "saturation", "crop_scale"):
            if getattr(self, name) > 1:
                raise ValueError(f"augment.{name} must be at most 1, got {getattr(self, name)}")
        if self.hue > 0.5:
            raise ValueError(f"augment.hue must be at most 0.5, got {self.hue}")
        if self.fill not in FILLS:
            raise ValueError(f"augment.fill must be {', '.join(FILLS)}, got {self.fill!r}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"augment.interpolation must be {' or '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.rotate_step and self.rotate_step > self.rotate:
            raise ValueError(f"augment.rotate_step ({self.rotate_step}) is larger than augment.rotate ({self.rotate})")

    @property
    def moves(self) -> bool:
        return bool(self.rotate or self.shift or self.flip or self.flip_vertical)

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)


def crops(options: AugmentOptions, samples: NDArray[np.int64], seed: int, epoch: int) -> list[Crop] | None:
    """The part of each image that is cut out, or nothing if that is off."""
    if not options.crop_scale:
        return None
    draws = uniforms(samples, 4, seed, epoch, _CROP)
    scale = (options.crop_scale, 1.0)
    return [Crop(area, aspect, top, left, scale) for area, aspect, top, left in draws.tolist()]


def augment(images: Tensor, options: AugmentOptions, samples: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Images [B, C, H, W] between 0 and 1 -> the same, moved and recoloured. `samples` [B] are their numbers in the split."""
    if options.moves:
        images = _move(images, options, uniforms(samples, 5, seed, epoch, _GEOMETRY), options.interpolation)
        if options.interpolation == "bicubic":
            images = images.clamp(0, 1)  # it overshoots at edges
    if options.brightness or options.contrast or (images.shape[1] == 3 and (options.saturation or options.hue)):
        images = _recolour(images, options, uniforms(samples, 4, seed, epoch, _COLOUR))
    return images


def augment_masks(masks: Tensor, options: AugmentOptions, samples: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Masks [B, H, W] of class indices, moved as `augment` moves their images, by the nearest pixel. What comes in from outside
    does not count, unless `fill` puts pixels of the image there."""
    if not options.moves:
        return masks
    shown = masks.float().add(1)[:, None]  # 0 is what is outside
    moved = _move(shown, options, uniforms(samples, 5, seed, epoch, _GEOMETRY), "nearest")[:, 0].to(masks.dtype)
    return torch.where(moved == 0, IGNORED, moved - 1)


def _move(images: Tensor, options: AugmentOptions, draws: NDArray[np.float64], mode: str) -> Tensor:
    """Turn, mirror, shift: one affine map of the plane about the centre of the image, and one sampling."""
    import kornia.geometry.transform as geometry

    angle = (2 * draws[:, 0] - 1) * options.rotate
    if options.rotate_step:
        # Steps in (-rotate, rotate]: the two half turns are one, and must not be drawn twice as often.
        steps = int(2 * options.rotate // options.rotate_step)
        count = steps if math.isclose(steps * options.rotate_step, 360) else steps + 1
        angle = (np.floor(draws[:, 0] * count) - (count - 1) // 2) * options.rotate_step
    shift = np.floor(draws[:, 1:3] * (2 * options.shift + 1)) - options.shift
    mirror = np.where((draws[:, 3] < 0.5) & options.flip, -1.0, 1.0)
    upset = np.where((draws[:, 4] < 0.5) & options.flip_vertical, -1.0, 1.0)

    height, width = images.shape[-2:]
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    linear = np.stack([np.stack([cos * mirror, sin * upset], -1), np.stack([-sin * mirror, cos * upset], -1)], 1)  # [B, 2, 2]
    offset = centre - linear @ centre + shift
    matrix = torch.from_numpy(np.concatenate([linear, offset[:, :, None]], axis=2)).to(images)  # [B, 2, 3]
    return geometry.warp_affine(images, matrix, (height, width), mode, padding_mode=options.fill, align_corners=True)


def _recolour(images: Tensor, options: AugmentOptions, draws: NDArray[np.float64]) -> Tensor:
    """Brightness, contrast and saturation by factors 1 - a ... 1 + a, hue by a turn of the colour circle."""
    import kornia.enhance as enhance

    factors = torch.from_numpy(2 * draws - 1).to(images)  # [B, 4] in [-1, 1)
    if options.brightness:
        images = (images * (1 + options.brightness * factors[:, 0, None, None, None])).clamp(0, 1)
    if options.contrast:
        images = enhance.adjust_contrast_with_mean_subtraction(images, 1 + options.contrast * factors[:, 1])
    if images.shape[1] == 3 and options.saturation:
        images = enhance.adjust_saturation(images, 1 + options.saturation * factors[:, 2])
    if images.shape[1] == 3 and options.hue:
        images = enhance.adjust_hue(images, 2 * math.pi * options.hue * factors[:, 3])
    return images


def partners(samples: NDArray[np.int64], blocks: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The sample that each sample is mixed with: any other of its block, whatever else is in the batch.

    Block k has the samples from `blocks[k]` to before `blocks[k + 1]`; a split that is no archive is one block.
    """
    block = np.searchsorted(blocks, samples, side="right") - 1
    first, length = blocks[block], np.diff(blocks)[block]
    step = 1 + np.floor(uniforms(samples, 1, seed, epoch, _MIX, "partner")[:, 0] * (length - 1)).astype(np.int64)
    return first + (samples - first + step) % length


def mix(
    images: Tensor, other: Tensor, targets: Tensor, other_targets: Tensor, options: AugmentOptions,
    samples: NDArray[np.int64], seed: int, epoch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mixup (a weighted sum of two images) or cutmix (a rectangle of the other image), with targets [B, K] mixed alike."""
    height, width = images.shape[-2:]
    cut = np.full(len(samples), not options.mixup)
    if options.mixup and options.cutmix:
        cut = uniforms(samples, 1, seed, epoch, _MIX, "kind")[:, 0] < 0.5
    share, where = np.empty(len(samples)), uniforms(samples, 2, seed, epoch, _MIX, "where")
    weight = np.empty((len(samples), 1, height, width))  # of the image itself, pixel by pixel
    for i, sample in enumerate(samples):
        generator = np.random.Generator(np.random.Philox(key=[key(seed, epoch, _MIX, "share"), int(sample)]))
        alpha = options.cutmix if cut[i] else options.mixup
        share[i] = generator.beta(alpha, alpha)
        weight[i] = share[i]
        if cut[i]:
            tall, wide = (round(side * math.sqrt(1 - share[i])) for side in (height, width))
            top, left = int(where[i, 0] * (height - tall + 1)), int(where[i, 1] * (width - wide + 1))
            weight[i] = 1
            weight[i, :, top : top + tall, left : left + wide] = 0
            share[i] = 1 - tall * wide / (height * width)
    pixels, rows = torch.from_numpy(weight).to(images), torch.from_numpy(share).to(targets)[:, None]
    return pixels * images + (1 - pixels) * other, rows * targets + (1 - rows) * other_targets
