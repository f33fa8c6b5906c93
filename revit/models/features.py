"""The maps inside a model, by name; and a model as a backbone for detection, segmentation and the like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from revit.nn.pooling import GroupPool

POOLS = (None, "group")


def features_by_name(model: Any, x: Tensor) -> dict[str, Tensor]:
    """What `forward_features` puts into its dict on the way, then the `logits`."""
    features: dict[str, Tensor] = {}
    features["logits"] = model.forward_head(model.forward_features(x, features))
    return features


class FeatureMaps(nn.Module):
    """Wraps a model with named stages: images [B, C, H, W] -> list of maps [B, C*G, H, W], coarser and coarser.

    `feature_info` says of each map its channels (`num_chs`), how much smaller than the image it is (`reduction`) and where
    it comes from (`module`). The field axis comes first: `map.unflatten(1, (-1, G))` is the feature map on the group.
    `pool="group"` takes the largest of the elements at each pixel: maps [B, C, H, W] that turn with the image as images do, so
    that whatever comes after them, if it turns too, such as convolutions with symmetric filters or 1x1, keeps the symmetry.
    """

    def __init__(self, model: Any, out_indices: Sequence[int] | None = None, pool: str | None = None) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be None (maps [B, C*G, H, W]) or 'group' (invariant maps [B, C, H, W]), got {pool!r}")
        self.pool = nn.Flatten(1, 2) if pool is None else GroupPool("max")
        stages: list[dict[str, Any]] = model.feature_info
        count = len(stages)
        indices = list(range(count)) if out_indices is None else list(out_indices)
        for index in indices:
            if not isinstance(index, int) or not -count <= index < count:
                raise ValueError(f"out_indices must be in {-count} to {count - 1} for {count} features, got {index!r}")
        self.out_indices = tuple(index % count for index in indices)
        if not self.out_indices or len(set(self.out_indices)) != len(self.out_indices):
            raise ValueError(f"out_indices must name each feature at most once and at least one, got {indices}")
        self.group = model.group
        shrink = 1 if pool is None else self.group.order
        self.feature_info = [{**stages[i], "num_chs": stages[i]["num_chs"] // shrink} for i in self.out_indices]
        model.prune_after(stages[max(self.out_indices)]["module"])
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        features: dict[str, Tensor] = {}
        self.model.forward_features(x, features)
        return [self.pool(features[info["module"]]) for info in self.feature_info]

    def channels(self) -> list[int]:
        return [info["num_chs"] for info in self.feature_info]

    def reduction(self) -> list[int]:
        return [info["reduction"] for info in self.feature_info]
