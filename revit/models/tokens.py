"""What the plain transformers share: blocks on tokens, the class token or the mean before the classifier, no group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from torch import Tensor, nn

from revit.deployment import deploy
from revit.groups import Group
from revit.models.features import features_by_name
from revit.models.pretrained import Pretrained
from revit.nn.dropout import DropPath

POOLS = ("token", "mean")


class Block(nn.Module):
    """`x = x + attn(norm(x))`, then `x = x + mlp(norm(x))`, on tokens [B, N, D]; `size` goes to the attention, if it asks."""

    def __init__(self, dim: int, attn: nn.Module, *, mlp_ratio: float, dropout: float, drop_path: float) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        if hidden < 1:
            raise ValueError(f"mlp_ratio={mlp_ratio!r} leaves no hidden channel of {dim}; choose at least {1 / dim:g}")
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, *size: int) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), *size))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class TokenTransformer(nn.Module, Pretrained, ABC):
    """What follows the tokens [B, (1 +) H'*W', D] of `forward_features`, the class token first if `pool` is `token`.

    A model sets `num_features`, `pool`, `head`, `cls_token` and its embeddings.
    """

    kind: str
    """How messages call it."""
    num_features: int
    pool: str
    head: nn.Module
    cls_token: nn.Parameter | None
    folds = ()
    """Its own parameters, the embeddings, stay as they are in `deploy`."""

    @abstractmethod
    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> tokens; the maps on the way are put into `features` by name, if it is given."""

    def forward_head(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Tokens -> logits [B, num_classes], or what the classifier reads [B, D] with `pre_logits`."""
        x = x[:, 0] if self.pool == "token" else x.mean(dim=1)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def named_features(self, x: Tensor) -> dict[str, Tensor]:
        """Every map by name, from `lift` to `pre_class`, then `logits`."""
        return features_by_name(self, x)

    @property
    def num_classes(self) -> int:
        return self.head.out_features if isinstance(self.head, nn.Linear) else 0

    def get_classifier(self) -> nn.Module:
        """The last linear layer (`nn.Identity` without classes)."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh classifier for another number of classes; 0 makes the model return its features [B, D]."""
        self.head = classifier(self.num_features, num_classes).to(next(self.parameters())).train(self.training)

    def deploy(self, image_size: int | tuple[int, int] | None = None) -> Self:
        """A copy without what only training needs, with folded norms and the same outputs: the one to ship."""
        return deploy(self, image_size)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone: norms, biases, positions and the class token."""
        embeddings = ("pos_embed", "cls_token")
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1 or name in embeddings}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        raise ValueError(f"features_only needs a model on a group; {self.kind} gives its maps by named_features")


def as_map(tokens: Tensor, size: tuple[int, ...]) -> Tensor:
    """The map [B, D, H, W] of the last H*W of the tokens [B, N, D]."""
    return tokens[:, -size[0] * size[1] :].transpose(1, 2).unflatten(2, size)


def check_plain(model: str, group: Group | str, pool: str) -> Group:
    group = Group.parse(group)
    if group.order > 1:
        raise ValueError(f"{model} is not equivariant: its group is z2, got {group}; REViT and G-CNN models take it")
    if pool not in POOLS:
        raise ValueError(f"unknown pool {pool!r}; choose {', '.join(POOLS)}")
    return group


def check_heads(dim: int, heads: int) -> None:
    if dim % heads:
        divisors = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise ValueError(f"num_heads={heads} does not divide the {dim} channels; choose {divisors}")


def classifier(dim: int, num_classes: int) -> nn.Module:
    if num_classes < 0:
        raise ValueError(f"a head needs num_classes >= 0, got {num_classes}")
    return nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def start_small(model: nn.Module, *embeddings: nn.Parameter | None) -> None:
    """Linear layers and embeddings start from a normal distribution of deviation 0.02, biases from zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    for embedding in embeddings:
        if embedding is not None:
            nn.init.trunc_normal_(embedding, std=0.02)
