"""Turning digits by any angle: what makes MNIST rotated MNIST."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

CHUNK = 2048


def turn_digits(images: NDArray[np.uint8], degrees: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Turns each image [H, W] of [N, H, W] counter-clockwise about its centre by its own angle [N].

    Bilinear, zero outside; multiples of 90 degrees are `np.rot90`. In float64, so that all machines round to the same bytes.
    """
    if images.ndim != 3 or len(images) != len(degrees):
        raise ValueError(f"images [N, H, W] need as many angles, got shape {list(images.shape)} and {len(degrees)} angles")
    turned = np.empty_like(images)
    for start in range(0, len(images), CHUNK):
        part = slice(start, start + CHUNK)
        turned[part] = _turn(images[part], degrees[part])
    return turned


def _turn(images: NDArray[np.uint8], degrees: NDArray[np.float64]) -> NDArray[np.uint8]:
    height, width = images.shape[1:]
    angle = torch.from_numpy(np.radians(degrees.astype(np.float64)))[:, None, None]  # [N, 1, 1]
    up = ((height - 1) / 2 - torch.arange(height, dtype=torch.float64))[:, None]  # [H, 1]
    right = (torch.arange(width, dtype=torch.float64) - (width - 1) / 2)[None]  # [1, W]
    # The value at a point comes from the point turned back, R^-1 (right, up).
    source_right = angle.cos() * right + angle.sin() * up  # [N, H, W]
    source_up = angle.cos() * up - angle.sin() * right
    grid = torch.stack((2 * source_right / width, -2 * source_up / height), dim=-1)  # [-1, 1], y down
    pixels = torch.from_numpy(images.astype(np.float64)).unsqueeze(1)  # [N, 1, H, W]
    turned = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.squeeze(1).round_().clamp_(0, 255).to(torch.uint8).numpy()
