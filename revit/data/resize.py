"""Cutting and resizing one image: bilinear with antialiasing, whose sampling points lie symmetrically, as turning needs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from revit.data.spec import Crop, Pixels


def crop_and_resize(image: Pixels, size: tuple[int, int], crop: Crop | None = None) -> Pixels:
    """[C, h, w] -> [C, H, W]: the part that the crop names, or the centre of the largest H : W rectangle, resized."""
    top, left, tall, wide = seen_box(image.shape[-2], image.shape[-1], size, crop)
    image = image[:, top : top + tall, left : left + wide]
    if (tall, wide) == size:
        return image
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].float()
    resized = F.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    if image.dtype == np.uint8:
        return resized.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return resized.numpy()


def crop_and_resize_mask(mask: NDArray[np.uint8], size: tuple[int, int], crop: Crop | None = None) -> NDArray[np.uint8]:
    """[h, w] -> [H, W], as `crop_and_resize` does with the image; class indices have no mean, so the nearest pixel is taken."""
    top, left, tall, wide = seen_box(mask.shape[0], mask.shape[1], size, crop)
    return resize_mask(mask[top : top + tall, left : left + wide], size)


def resize_mask(mask: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """[h, w] -> [H, W] by the nearest pixel."""
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(size, mask.shape, strict=True))
    return mask if mask.shape == size else mask[rows[:, None], columns]


def seen_box(height: int, width: int, size: tuple[int, int], crop: Crop | None = None) -> tuple[int, int, int, int]:
    """Top, left, height and width of the part of an image that is resized to a size."""
    if crop is not None:
        return crop.box(height, width)
    # As much is cut off at one side as at the other, or turning by 180 degrees would not commute.
    top = max(0, height * size[1] - width * size[0]) // (2 * size[1])
    left = max(0, width * size[0] - height * size[1]) // (2 * size[0])
    return top, left, height - 2 * top, width - 2 * left
