"""Cutting and resizing one image: bilinear with antialiasing, whose sampling points lie symmetrically, as turning needs."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from revit.data.spec import Crop, Pixels


def crop_and_resize(image: Pixels, size: tuple[int, int], crop: Crop | None = None) -> Pixels:
    """[C, h, w] -> [C, H, W]: the part that the crop names, or the centre of the largest H : W rectangle, resized."""
    height, width = image.shape[-2:]
    if crop is not None:
        top, left, tall, wide = crop.box(height, width)
    else:
        # As much is cut off at one side as at the other, or turning by 180 degrees would not commute.
        top = max(0, height * size[1] - width * size[0]) // (2 * size[1])
        left = max(0, width * size[0] - height * size[1]) // (2 * size[0])
        tall, wide = height - 2 * top, width - 2 * left
    image = image[:, top : top + tall, left : left + wide]
    if (tall, wide) == size:
        return image
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].float()
    resized = F.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    if image.dtype == np.uint8:
        return resized.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return resized.numpy()
