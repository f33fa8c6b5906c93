"""Models by name: one dict, one decorator, one list."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from revit.models.features import FeatureMaps
from revit.models.model_config import ModelConfig, read_config, shipped, shipped_folder

_MODELS: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Adds a function that builds a model to the registry, under its own name."""
    name = builder.__name__
    if name in _MODELS:
        raise ValueError(f"a model named {name!r} is already registered")
    _MODELS[name] = builder
    return builder


def list_models(filter: str = "", *, pretrained: bool = False) -> list[str]:
    """Names of all models, or of those that contain a text; with `pretrained`, of those whose weights come with the package."""
    return sorted(name for name in (shipped() if pretrained else _MODELS) if filter in name)


def describe_model(name: str) -> str:
    """One line on a model: the first of its builder's docstring."""
    return (_MODELS[name].__doc__ or "").strip().split("\n")[0]


def create_model(
    name: str,
    *,
    pretrained: bool | str | Path = False,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds a registered model.

    `overrides` are arguments of the model, among them `group`, `in_chans`, `num_classes`. `features_only` gives a
    backbone instead: a list of maps [B, C*G, H, W], one for each of `out_indices` (default: all); with `pool="group"` they are
    [B, C, H, W], the largest of the elements at each pixel. `pretrained` loads weights that come with the package
    (`list_models(pretrained=True)` names them), or those of a folder, strictly, and gives the model in eval mode.

    >>> model = create_model("revit_tiny", group="p4m", in_chans=3, num_classes=2)
    >>> model.num_features
    16
    """
    from revit.models.pretrained import load_folder  # which builds models, and so imports this module

    if out_indices is not None and not features_only:
        raise ValueError("out_indices needs features_only=True")
    pool = overrides.pop("pool", None) if features_only else None  # of a whole model it is an argument like others
    if pretrained:
        folder = shipped_folder(name) if pretrained is True else Path(pretrained).expanduser()
        if pretrained is True:
            name = read_config(folder).model
        model = load_folder(folder, name, overrides)
    else:
        if name not in _MODELS and name in shipped():
            config = read_config(shipped_folder(name))
            name, overrides = config.model, {**config.options, **overrides}
        model = build_model(name, overrides)
    return FeatureMaps(model, out_indices, pool) if features_only else model


def build_model(name: str, options: dict[str, Any]) -> nn.Module:
    """A registered model with fresh weights, which knows what it was built from."""
    if name not in _MODELS:
        near = difflib.get_close_matches(str(name), _MODELS, n=3, cutoff=0.4) or sorted(_MODELS)
        raise ValueError(f"unknown model {name!r}; did you mean {', '.join(near)}? list_models() names all")
    try:
        model: Any = _MODELS[name](**options)
    except TypeError as error:
        raise ValueError(f"model {name!r}: {error}") from error
    model.config = ModelConfig(name, dict(options))
    return model
