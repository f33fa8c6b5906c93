"""Hierarchical REViT for large images: a lifting stem (a quarter of the size), four stages of windowed G-CSA.

The same class as the flat model, with the presets of the released ImageNet code. Ours are exact at every size; the `_paper`
variants have its odd strided kernels, full 3 x 3 steerable projections and spatial attention, and its parameter counts.
"""

from __future__ import annotations

from typing import Any

from revit.models.registry import register_model
from revit.models.revit import PAPER, REViT, positive

_STEM: dict[str, Any] = {"stride": (2, 2), "kernel_size": 3, "neighbourhood": "window", "window_size": 7}
_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {"dims": (12, 24, 48, 96), "depths": (1, 2, 3, 1), "num_heads": (1, 2, 4, 8)},
    "small": {"dims": (24, 48, 96, 192), "depths": (1, 2, 4, 1), "num_heads": (1, 2, 4, 8)},
    "medium": {"dims": (32, 64, 128, 256), "depths": (1, 2, 4, 1), "num_heads": (1, 2, 4, 8)},
    "base": {"dims": (64, 128, 256, 512), "depths": (2, 2, 6, 2), "num_heads": (2, 4, 8, 16)},
}


def _build(size: str, *variants: dict[str, Any], **overrides: Any) -> REViT:
    options: dict[str, Any] = {**_SIZES[size]}
    for variant in (*variants, _STEM, overrides):
        options.update(variant)
    options.setdefault("head_hidden", max(256, positive("dims", options["dims"])[-1] // 2))
    return REViT(**options)


@register_model
def revit_hier_tiny(**overrides: Any) -> REViT:
    """Four stages of 12 to 96 fields, for 224 pixels."""
    return _build("tiny", **overrides)


@register_model
def revit_hier_small(**overrides: Any) -> REViT:
    """Four stages of 24 to 192 fields."""
    return _build("small", **overrides)


@register_model
def revit_hier_medium(**overrides: Any) -> REViT:
    """Four stages of 32 to 256 fields."""
    return _build("medium", **overrides)


@register_model
def revit_hier_base(**overrides: Any) -> REViT:
    """Four stages of 64 to 512 fields, twelve blocks."""
    return _build("base", **overrides)


@register_model
def revit_hier_tiny_paper(**overrides: Any) -> REViT:
    """The released `tiny` preset."""
    return _build("tiny", PAPER, **overrides)


@register_model
def revit_hier_small_paper(**overrides: Any) -> REViT:
    """The ImageNet model of the paper: 18,537,852 parameters with group="p4m"."""
    return _build("small", PAPER, **overrides)


@register_model
def revit_hier_medium_paper(**overrides: Any) -> REViT:
    """The released `medium` preset."""
    return _build("medium", PAPER, **overrides)


@register_model
def revit_hier_base_paper(**overrides: Any) -> REViT:
    """The released `base` preset."""
    return _build("base", PAPER, **overrides)
