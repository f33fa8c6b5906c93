"""Mean and standard deviation of each channel, one image after another, in memory for one image."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from revit.data.spec import DataError, Pixels


def channel_statistics(images: Iterable[Pixels]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations over all pixels of images [C, H, W], of values between 0 and 1 (uint8 is divided by 255).

    Images of several sizes count by their pixels. A channel without any variation gets deviation 1.
    """
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    for image in images:
        values = image.reshape(image.shape[0], -1).astype(np.float64)
        if image.dtype == np.uint8:
            values /= 255
        count += values.shape[1]
        total = total + values.sum(axis=1)
        squares = squares + np.square(values).sum(axis=1)
    if count == 0:
        raise DataError("no image to compute statistics from")
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    return tuple(mean.tolist()), tuple(np.where(std > 1e-6, std, 1.0).tolist())
