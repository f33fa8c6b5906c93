"""Fixes the algorithms of a model for images of one size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from revit.nn.convolution import GroupConv, GroupLinear


def fix_algorithms(model: nn.Module, image_size: int | tuple[int, int]) -> None:
    """Gives each group convolution that chooses for itself the algorithm that it takes for images of this size.

    The sizes of its maps are read off one image that goes through the model. A layer that sees maps of several sizes takes
    `fourier` if it does at all of them. Raises `ValueError` for sizes that the model refuses.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    layers = [
        layer for layer in model.modules() if isinstance(layer, GroupConv | GroupLinear) and layer.algorithm.name == "auto"
    ]
    choices: dict[GroupConv | GroupLinear, list[bool]] = {layer: [] for layer in layers}
    hooks = [layer.register_forward_hook(_note(choices[layer])) for layer in layers]
    try:
        with torch.no_grad():
            model(next(model.parameters()).new_zeros(1, _image_channels(model), height, width))
    finally:
        for hook in hooks:
            hook.remove()
    for layer, found in choices.items():
        layer.algorithm = layer.algorithm.renamed("fourier" if found and all(found) else "dense")


def _image_channels(model: nn.Module) -> int:
    for module in model.modules():  # the model itself, or what is wrapped
        if isinstance(channels := getattr(module, "in_chans", None), int):
            return channels
    raise ValueError(f"deploy() with an image_size needs a model of images, got {type(model).__name__} without in_chans")


def _note(choices: list[bool]) -> Callable[[Any, Any, Tensor], None]:
    def note(layer: Any, _: Any, out: Tensor) -> None:
        choices.append(layer.algorithm.is_fourier(math.prod(out.shape[-2:])))

    return note
