"""The neighbourhoods of attention, cut out of feature maps [B, C, G, H, W]: windows, the pixels around each pixel, parts.

Letters: B batch, N neighbourhoods, C fields, G elements, P positions in a neighbourhood.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from revit.exactness import Tiling


def split_windows(x: Tensor, rows: Tiling, columns: Tiling) -> Tensor:
    """[B, C, G, H, W] -> [B, N, C, G, P]: pads, then cuts windows."""
    if rows.padded or columns.padded:
        x = F.pad(x, (columns.before, columns.after, rows.before, rows.after))
    x = x.unflatten(-1, (-1, columns.side)).unflatten(-3, (-1, rows.side))  # [B, C, G, rows, h, columns, w]
    return x.permute(0, 3, 5, 1, 2, 4, 6).flatten(5).flatten(1, 2)  # [B, rows*columns, C, G, h*w]


def join_windows(x: Tensor, rows: Tiling, columns: Tiling, height: int, width: int) -> Tensor:
    """The inverse of `split_windows`, to [B, C, G, H, W]."""
    count = (height + rows.before + rows.after) // rows.side
    x = x.unflatten(1, (count, -1)).unflatten(-1, (rows.side, columns.side))  # [B, rows, columns, C, G, h, w]
    x = x.permute(0, 3, 4, 1, 5, 2, 6).flatten(-2).flatten(-3, -2)  # [B, C, G, H + padding, W + padding]
    return x[..., rows.before : rows.before + height, columns.before : columns.before + width]


def unfold_neighbours(x: Tensor, size: int) -> Tensor:
    """[B, C, G, H, W] -> [B, H*W, C, G, size*size]: the pixels around each pixel, zero outside the image."""
    channels, order = x.shape[1:3]
    patches = F.unfold(x.flatten(1, 2), size, padding=size // 2)  # [B, C*G*size*size, H*W]
    return patches.transpose(1, 2).unflatten(2, (channels, order, size * size))


def reduce_map(x: Tensor, reduction: int) -> Tensor:
    """[B, C, G, H, W] -> [B, C, G, ceil(H/r), ceil(W/r)] by means of parts that lie symmetrically at every size."""
    if reduction == 1:
        return x
    height, width = (-(-side // reduction) for side in x.shape[-2:])
    return F.adaptive_avg_pool2d(x.flatten(1, 2), (height, width)).unflatten(1, x.shape[1:3])


def spread_parts(weights: Tensor, reduction: int, height: int, width: int) -> Tensor:
    """Weights of the parts of a map, [B, P'], as those of its pixels, [B, H, W]: what `reduce_map` does, transposed."""
    rows, columns = (
        reduce_map(torch.eye(side).to(weights)[:, None, None, :, None].expand(-1, -1, -1, -1, reduction), reduction)[
            :, 0, 0, :, 0
        ]
        for side in (height, width)
    )  # [H, H'], [W, W']
    return rows @ weights.unflatten(1, (rows.shape[1], -1)) @ columns.T
