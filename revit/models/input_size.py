"""Input checks of models: is this an image that the model takes, and is the model exact at its size?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from revit.exactness import EquivarianceError
from revit.nn.attention import GroupConvAttention
from revit.nn.pooling import BlurPool, Downsample, LiftingLayer

SIZED_LAYERS = LiftingLayer | Downsample | BlurPool | GroupConvAttention
"""The layers whose exactness depends on the size of their input."""


def check_images(x: Tensor, in_chans: int, min_size: int) -> None:
    """Raises `ValueError` for anything but finite floating-point images [B, in_chans, H, W] of at least the minimum size."""
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(f"expected images [B, {in_chans}, H, W], got shape {list(x.shape)}")
    if min(x.shape[-2:]) < min_size:
        raise ValueError(_too_small(tuple(x.shape[-2:]), min_size))
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images, got {x.dtype}; scale them, for example x.float() / 255")
    if not torch.compiler.is_compiling() and not torch.isfinite(x).all():
        bad = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(f"images with NaN or infinite pixels at batch positions {bad[:8]}: mend or drop them")


def trace_sizes(model: nn.Module, size: tuple[int, int], min_size: int) -> dict[str, tuple[int, int]]:
    """The size after each layer, by layer name; raises `EquivarianceError` at the first that cannot be exact."""
    if min(size) < min_size:
        raise ValueError(_too_small(size, min_size))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SIZED_LAYERS)}
    sizes: dict[str, tuple[int, int]] = {}
    current = size
    for name, layer in layers.items():
        try:
            sizes[name] = current = layer.output_size(*current)
        except EquivarianceError as error:
            nearest = [_exact_sizes_near(list(layers.values()), side, min_size) for side in size]
            text = nearest[0] if nearest[0] == nearest[1] else f"height {nearest[0]}, width {nearest[1]}"
            raise EquivarianceError(f"{name}: {error}. Nearest exact input sizes of the model: {text}") from error
    return sizes


def _exact_sizes_near(layers: Sequence[SIZED_LAYERS], size: int, min_size: int) -> str:
    """The nearest exact input sizes on one axis: the size itself if it is one, else one below and one above."""

    def exact(side: int) -> bool:
        sizes = side, side
        try:
            for layer in layers:
                sizes = layer.output_size(*sizes)
        except EquivarianceError:
            return False
        return True

    if exact(size):
        return str(size)
    below = next((s for s in range(size - 1, min_size - 1, -1) if exact(s)), None)
    above = next((s for s in range(size + 1, 2 * size + 128) if exact(s)), None)
    return " and ".join(str(s) for s in (below, above) if s is not None) or "none"


def _too_small(size: tuple[int, ...], min_size: int) -> str:
    return f"images of {size[0]} x {size[1]} are below the minimum of {min_size} x {min_size} of this model"
