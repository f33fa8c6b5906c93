"""Augmentation of a batch on its device, each image by random numbers of its own.

Turning, mirroring, shifting and bending are one map of the plane, so an image is resampled once. Nothing here is used by
audits: those move pixels by permutation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from revit.data.randomness import key, uniforms
from revit.data.spec import IGNORED, Crop

FILLS = ("zeros", "border", "reflection")
INTERPOLATIONS = ("bilinear", "bicubic", "fourier")
ELASTIC_NODES = 5
"""Nodes along each axis of the net whose random shifts bend an image."""

_GEOMETRY, _SHAPE, _ELASTIC, _COLOUR, _CROP, _MIX = "geometry", "shape", "elastic", "colour", "crop", "mix"


@dataclass
class AugmentOptions:
    """Random changes of the training images. All off by default.

    Args:
        rotate: Largest angle in degrees, to both sides; 180 turns by any angle.
        rotate_step: Turn by multiples of this many degrees only; 0 for any angle.
        shift: Largest shift in pixels along each axis (a random crop of an image padded by as much).
        zoom: Largest relative change of size: 0.1 for 0.9 to 1.1 times.
        shear: Largest shear, along an axis of any direction: 0.1 moves what is 10 pixels away by one.
        elastic: Largest shift in pixels of each node of a net over the image; what lies between follows smoothly.
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
        interpolation: Of images that are turned: bilinear; bicubic, which blurs less; or fourier, bicubic between the pixels of
            the image at twice its resolution, which blurs least (digits that were turned before are turned again, those of the
            test are not: what turns blur is a difference between the two).
    """

    rotate: float = 0.0
    rotate_step: float = 0.0
    shift: int = 0
    zoom: float = 0.0
    shear: float = 0.0
    elastic: float = 0.0
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
        if self.zoom >= 1:
            raise ValueError(f"augment.zoom must be less than 1, got {self.zoom}")
        for name in ("brightness", "contrast", "saturation", "crop_scale", "shear"):
            if getattr(self, name) > 1:
                raise ValueError(f"augment.{name} must be at most 1, got {getattr(self, name)}")
        if self.hue > 0.5:
            raise ValueError(f"augment.hue must be at most 0.5, got {self.hue}")
        if self.fill not in FILLS:
            raise ValueError(f"augment.fill must be {', '.join(FILLS)}, got {self.fill!r}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"augment.interpolation must be {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.rotate_step and self.rotate_step > self.rotate:
            raise ValueError(f"augment.rotate_step ({self.rotate_step}) is larger than augment.rotate ({self.rotate})")

    @property
    def moves(self) -> bool:
        return bool(self.rotate or self.shift or self.bends or self.flip or self.flip_vertical)

    @property
    def bends(self) -> bool:
        return bool(self.zoom or self.shear or self.elastic)

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
        images = _sample(images, _places(images, options, samples, seed, epoch), options.interpolation, options.fill)
        if options.interpolation != "bilinear":
            images = images.clamp(0, 1)  # the others overshoot at edges
    if options.brightness or options.contrast or (images.shape[1] == 3 and (options.saturation or options.hue)):
        images = _recolour(images, options, uniforms(samples, 4, seed, epoch, _COLOUR))
    return images


def augment_masks(masks: Tensor, options: AugmentOptions, samples: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Masks [B, H, W] of class indices, moved as `augment` moves their images, by the nearest pixel. What comes in from outside
    does not count, unless `fill` puts pixels of the image there."""
    if not options.moves:
        return masks
    shown = masks.float().add(1)[:, None]  # 0 is what is outside
    places = _places(shown, options, samples, seed, epoch)
    moved = _sample(shown, places, "nearest", options.fill)[:, 0].to(masks.dtype)
    return torch.where(moved == 0, IGNORED, moved - 1)


def _places(images: Tensor, options: AugmentOptions, samples: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Where each pixel of the moved images comes from, [B, H, W, 2] as (x, y) in pixels."""
    height, width = images.shape[-2:]
    draws = uniforms(samples, 5, seed, epoch, _GEOMETRY)
    shift = np.floor(draws[:, 1:3] * (2 * options.shift + 1)) - options.shift
    forward = _turns(options, draws)
    if options.zoom or options.shear:
        forward = forward @ _stretches(options, uniforms(samples, 3, seed, epoch, _SHAPE))
    back = torch.from_numpy(np.linalg.inv(forward)).to(images)  # [B, 2, 2]
    centre = torch.tensor([(width - 1) / 2, (height - 1) / 2]).to(images)
    y, x = torch.meshgrid(torch.arange(height).to(images), torch.arange(width).to(images), indexing="ij")
    offsets = torch.stack([x, y], -1).flatten(0, 1) - centre - torch.from_numpy(shift).to(images)[:, None]  # [B, H W, 2]
    places = (offsets @ back.transpose(1, 2) + centre).unflatten(1, (height, width))
    if options.elastic:
        nodes = uniforms(samples, 2 * ELASTIC_NODES**2, seed, epoch, _ELASTIC).reshape(-1, 2, ELASTIC_NODES, ELASTIC_NODES)
        net = torch.from_numpy(options.elastic * (2 * nodes - 1)).to(images)
        bent = F.interpolate(net, size=(height, width), mode="bicubic", align_corners=True)
        places = places + bent.permute(0, 2, 3, 1)
    return places


def _turns(options: AugmentOptions, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turns and mirrors as maps of the plane about the centre of the image, [B, 2, 2]."""
    angle = (2 * draws[:, 0] - 1) * options.rotate
    if options.rotate_step:
        # Steps in (-rotate, rotate]: the two half turns are one, and must not be drawn twice as often.
        steps = int(2 * options.rotate // options.rotate_step)
        count = steps if math.isclose(steps * options.rotate_step, 360) else steps + 1
        angle = (np.floor(draws[:, 0] * count) - (count - 1) // 2) * options.rotate_step
    mirror = np.where((draws[:, 3] < 0.5) & options.flip, -1.0, 1.0)
    upset = np.where((draws[:, 4] < 0.5) & options.flip_vertical, -1.0, 1.0)
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    return np.stack([np.stack([cos * mirror, sin * upset], -1), np.stack([-sin * mirror, cos * upset], -1)], 1)


def _stretches(options: AugmentOptions, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Zooms, and shears along an axis of any direction (a straight line through the centre that stays), [B, 2, 2]."""
    size = 1 + options.zoom * (2 * draws[:, 0] - 1)
    slope, direction = options.shear * (2 * draws[:, 1] - 1), np.pi * draws[:, 2]
    along = np.stack([np.cos(direction), np.sin(direction)], -1)
    across = np.stack([-np.sin(direction), np.cos(direction)], -1)
    shear = np.eye(2) + slope[:, None, None] * along[:, :, None] * across[:, None, :]
    return size[:, None, None] * shear


def _sample(images: Tensor, places: Tensor, mode: str, fill: str) -> Tensor:
    """Images [B, C, H, W] at `places` [B, H, W, 2] in pixels."""
    if mode == "fourier":
        images, places, mode = _doubled(images), 2 * places, "bicubic"
    last = torch.tensor([images.shape[-1] - 1, images.shape[-2] - 1]).to(images).clamp(min=1)
    return F.grid_sample(images, 2 * places / last - 1, mode, padding_mode=fill, align_corners=True)


def _doubled(images: Tensor) -> Tensor:
    """Images [..., H, W] -> [..., 2H - 1, 2W - 1], with new pixels between the old ones by Fourier interpolation."""
    down, across = (_between(size).to(images) for size in images.shape[-2:])
    return down @ images @ across.T


def _between(size: int) -> Tensor:
    """The matrix [2n - 1, n] of Fourier interpolation at every half pixel: the periodic sinc of n samples."""
    distance = torch.arange(2 * size - 1, dtype=torch.float64)[:, None] / 2 - torch.arange(size, dtype=torch.float64)
    angle = torch.pi * distance / size
    inner = torch.where(distance == 0, 1.0, angle)  # where the quotient is 0 / 0
    kernel = torch.sin(torch.pi * distance) / (size * (torch.sin(inner) if size % 2 else torch.tan(inner)))
    return torch.where(distance == 0, 1.0, kernel)


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
