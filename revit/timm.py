"""`import revit.timm` registers our models in timm: `timm.create_model("revit_small", group="p4m", num_classes=2)`.

`features_only=True` and `out_indices` work as in timm, `pretrained=True` where weights come with the package. timm, which needs
torchvision, is not a dependency: install both yourself. A name that timm has already stays timm's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from revit.models import create_model, list_models

try:
    import timm.models
    from timm.models import FeatureInfo
except ModuleNotFoundError as error:
    raise ImportError("revit.timm needs timm and torchvision, which are not installed; pip install timm") from error

__all__ = ["register"]  # and what timm adds: the names that it registers


def register(name: str) -> None:
    """Registers one model in timm, under its own name."""

    def build(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: Any = None,
        cache_dir: Any = None,
        **options: Any,
    ) -> nn.Module:
        if pretrained_cfg is not None or pretrained_cfg_overlay is not None:
            raise ValueError(f"{name}: models of revit have no tags and configs of timm; their own weights: pretrained=True")
        model: Any = create_model(name, pretrained=pretrained, **options)
        whole = model.model if options.get("features_only") else model
        if whole is not model:
            model.feature_info = FeatureInfo(model.feature_info, out_indices=tuple(range(len(model.feature_info))))
        model.pretrained_cfg = model.default_cfg = _timm_config(name, whole)
        return model

    build.__name__, build.__doc__ = name, f"`revit.create_model({name!r})`."
    timm.models.register_model(build)


def _timm_config(name: str, model: Any) -> dict[str, Any]:
    """What timm's data pipeline asks of a model, as far as it is known."""
    data, channels = model.config.data or {}, model.in_chans
    config: dict[str, Any] = {"architecture": name, "num_classes": model.config.options.get("num_classes", model.num_classes)}
    if "size" in data:
        config |= {"input_size": (channels, *data["size"]), "crop_pct": data.get("centre", 1.0)}
    return config | {key: tuple(data[key]) for key in ("mean", "std") if key in data}


for _name in (*list_models(), *list_models(pretrained=True)):
    if not timm.models.is_model(_name):
        register(_name)
