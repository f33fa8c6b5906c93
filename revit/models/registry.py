"""Models by name: one dict, one decorator, one list."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from revit.models.features import FeatureMaps

_MODELS: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Adds a function that builds a model to the registry, under its own name."""
    name = builder.__name__
    if name in _MODELS:
        raise ValueError(f"a model named {name!r} is already registered")
    _MODELS[name] = builder
    return builder


def list_models(filter: str = "") -> list[str]:
    """Names of all models, or of those that contain a text."""
    return sorted(name for name in _MODELS if filter in name)


def describe_model(name: str) -> str:
    """One line on a model: the first of its builder's docstring."""
    return (_MODELS[name].__doc__ or "").strip().split("\n")[0]


def create_model(
    name: str, *, features_only: bool = False, out_indices: Sequence[int] | None = None, **overrides: Any
) -> nn.Module:
    """Builds a registered model.

    `overrides` are arguments of the model, among them `group`, `in_chans`, `num_classes`. `features_only` gives a
    backbone instead: a list of maps [B, C*G, H, W], one for each of `out_indices` (default: all).

    >>> model = create_model("revit_tiny", group="p4m", in_chans=3, num_classes=2)
    >>> model.num_features
    16
    """
    if name not in _MODELS:
        near = difflib.get_close_matches(str(name), _MODELS, n=3, cutoff=0.4) or list_models()
        raise ValueError(f"unknown model {name!r}; did you mean {', '.join(near)}? list_models() names all")
    if out_indices is not None and not features_only:
        raise ValueError("out_indices needs features_only=True")
    try:
        model = _MODELS[name](**overrides)
    except TypeError as error:
        raise ValueError(f"model {name!r}: {error}") from error
    return FeatureMaps(model, out_indices) if features_only else model
