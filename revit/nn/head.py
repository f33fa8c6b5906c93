"""The invariant head: forget the element, forget the position, then classify."""

from __future__ import annotations

from torch import Tensor, nn

from revit.nn.dropout import check_rate
from revit.nn.pooling import GroupPool, SpatialPool


class InvariantHead(nn.Module):
    """Pools [B, C, G, H, W] over the group and over space to invariant features, then a two-layer classifier.

    The logits do not change when the input is turned or mirrored. `num_classes=0` leaves the pooled features [B, C].
    `norm="layer"` has no statistics over the batch, like `make_norm`.
    """

    def __init__(
        self, channels: int, num_classes: int, *, hidden: int, dropout: float = 0.0, pool: str = "max", norm: str = "batch"
    ) -> None:
        super().__init__()
        if num_classes < 0 or hidden < 1:
            raise ValueError(f"a head needs num_classes >= 0 and hidden >= 1, got {num_classes} and {hidden}")
        self.group_pool, self.spatial_pool = GroupPool(pool), SpatialPool()
        self.channels, self.num_classes = channels, num_classes
        if num_classes == 0:
            self.hidden: nn.Module = nn.Identity()
            self.fc: nn.Module = nn.Identity()
            return
        hidden_norm = nn.LayerNorm(hidden) if norm == "layer" else nn.BatchNorm1d(hidden)
        self.hidden = nn.Sequential(
            nn.Linear(channels, hidden), hidden_norm, nn.ReLU(), nn.Dropout(check_rate("dropout", dropout))
        )
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        x = self.spatial_pool(self.group_pool(x))  # [B, C]
        return x if pre_logits else self.fc(self.hidden(x))
