"""The plain vision transformer, the baseline that has no symmetry: turn the image and its features do anything.

    image [B, C, H, W] --patches--> tokens [B, 1 + H'*W', D] --blocks--> tokens --class token or mean--> logits [B, classes]

Patches are embedded by one strided convolution, positions by a learnt table, and attention sees all tokens. There is no group
to choose: what the other models guarantee, this one would have to learn from turned images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.groups import Group
from revit.models.features import features_by_name
from revit.models.input_size import check_images
from revit.models.registry import register_model
from revit.models.revit import positive
from revit.nn.block import run_checkpointed
from revit.nn.dropout import DropPath, check_rate

POOLS = ("token", "mean")


class Attention(nn.Module):
    """Multi-head self-attention over tokens [B, N, D]."""

    def __init__(self, dim: int, num_heads: int, *, dropout: float, attn_dropout: float) -> None:
        super().__init__()
        self.num_heads, self.attn_dropout = num_heads, attn_dropout
        self.qkv, self.proj, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, N, D/heads]
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_dropout if self.training else 0.0)
        return self.drop(self.proj(out.transpose(1, 2).flatten(2)))  # [B, N, D]

    def attention_multiply_adds(self, tokens: int, dim: int) -> int:
        """Products of queries with keys and of weights with values for one image."""
        return 2 * tokens**2 * dim


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


class ViT(nn.Module):
    """Plain vision transformer: images [B, in_chans, H, W] -> logits [B, num_classes], equivariant to nothing.

    `dims` is the width of the tokens, `depths` the number of blocks. The table of positions has one entry for each patch of an
    image of `img_size`; images of another size get it resized (bicubic), so every size that `patch_size` divides works. `pool`
    is what the classifier reads: the class `token`, or the `mean` over the patches (then there is no class token). `group` is
    there because every model takes one; it can only be z2.
    """

    def __init__(
        self,
        *,
        group: Group | str = "z2",
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int = 224,
        patch_size: int = 16,
        dims: int | Sequence[int] = 384,
        depths: int | Sequence[int] = 12,
        num_heads: int | Sequence[int] = 6,
        mlp_ratio: float = 4,
        pool: str = "token",
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.group = check_plain("a plain ViT", group, pool)
        dim, depth, heads = (_one(name, v) for name, v in (("dims", dims), ("depths", depths), ("num_heads", num_heads)))
        check_heads(dim, heads)
        self.in_chans, self.patch_size = _one("in_chans", in_chans), _one("patch_size", patch_size)
        self.dims, self.num_heads, self.num_features, self.pool = (dim,), (heads,), dim, pool
        self.min_input_size = self.patch_size
        self.grad_checkpointing = False

        rows, columns = self._patches(_one("img_size", img_size), img_size)
        self.patch_embed = nn.Conv2d(self.in_chans, dim, self.patch_size, stride=self.patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, dim, rows, columns))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if pool == "token" else None
        self.pos_drop = nn.Dropout(check_rate("drop_rate", drop_rate))
        self.blocks = nn.ModuleList()
        for i in range(depth):
            attn = Attention(dim, heads, dropout=drop_rate, attn_dropout=check_rate("attn_drop_rate", attn_drop_rate))
            rate = drop_path_rate * i / max(1, depth - 1)
            self.blocks.append(Block(dim, attn, mlp_ratio=mlp_ratio, dropout=drop_rate, drop_path=rate))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = classifier(dim, num_classes)
        start_small(self, self.pos_embed, self.cls_token)

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> tokens [B, (1 +) H'*W', D], the class token first. The maps on the way are put into `features` by name, if
        it is given, as [B, D, H', W'] without the class token: `lift` (the patch embedding), `blocks.0`, ..., `pre_class`."""
        check_images(x, self.in_chans, self.min_input_size)
        size = self._patches(*x.shape[-2:])

        def keep(name: str, tokens: Tensor) -> Tensor:
            if features is not None:
                features[name] = tokens[:, -size[0] * size[1] :].transpose(1, 2).unflatten(2, size)
            return tokens

        patches = self.patch_embed(x)  # [B, D, H', W']
        keep("lift", patches.flatten(2).transpose(1, 2))
        tokens = (patches + self._positions(size)).flatten(2).transpose(1, 2)  # [B, H'*W', D]
        if self.cls_token is not None:
            tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), tokens), dim=1)
        tokens = self.pos_drop(tokens)
        for i, block in enumerate(self.blocks):
            tokens = run_checkpointed(block, tokens) if self.grad_checkpointing and self.training else block(tokens)
            keep(f"blocks.{i}", tokens)
        return keep("pre_class", self.norm(tokens))

    def forward_head(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Tokens -> logits [B, num_classes], or what the classifier reads [B, D] with `pre_logits`."""
        x = x[:, 0] if self.pool == "token" else x.mean(dim=1)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def named_features(self, x: Tensor) -> dict[str, Tensor]:
        """Every map by name, from `lift` to `pre_class`, then `logits`."""
        return features_by_name(self, x)

    def check_input_size(self, height: int, width: int | None = None) -> dict[str, tuple[int, int]]:
        """The size of the map after the patch embedding; raises `ValueError` where the patches do not cover the image."""
        return {"patch_embed": self._patches(height, height if width is None else width)}

    def _patches(self, height: int, width: int) -> tuple[int, int]:
        patch = self.patch_size
        if height % patch or width % patch or min(height, width) < patch:
            near = [
                sorted({max(patch, side // patch * patch), max(patch, -(-side // patch) * patch)}) for side in (height, width)
            ]
            sizes = [" or ".join(map(str, sides)) for sides in near]
            nearest = sizes[0] if sizes[0] == sizes[1] else f"height {sizes[0]}, width {sizes[1]}"
            raise ValueError(
                f"patches of {patch} x {patch} do not cover images of {height} x {width}; nearest sizes: {nearest}"
            )
        return height // patch, width // patch

    def _positions(self, size: tuple[int, int]) -> Tensor:
        """The table of positions [1, D, H', W'] for a number of patches."""
        if size == tuple(self.pos_embed.shape[-2:]):
            return self.pos_embed
        return F.interpolate(self.pos_embed, size, mode="bicubic", antialias=True)

    @property
    def num_classes(self) -> int:
        return self.head.out_features if isinstance(self.head, nn.Linear) else 0

    def get_classifier(self) -> nn.Module:
        """The last linear layer (`nn.Identity` without classes)."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh classifier for another number of classes; 0 makes the model return its features [B, D]."""
        self.head = classifier(self.num_features, num_classes).to(self.pos_embed).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trades time for memory in training: blocks are computed again in the backward pass."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone: norms, biases, positions and the class token."""
        embeddings = ("pos_embed", "cls_token")
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1 or name in embeddings}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        raise ValueError("features_only needs a model on a group; a plain ViT gives its maps by named_features")


def _one(name: str, value: int | Sequence[int]) -> int:
    values = positive(name, value)
    if len(values) > 1:
        raise ValueError(f"a plain ViT has one stage, got {name}={values}")
    return values[0]


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


@register_model
def vit_tiny(**overrides: Any) -> ViT:
    """A plain ViT of the size of the paper's smallest models: 44,314 parameters for 28 x 28 x 1, 10 classes."""
    sizes = {"img_size": 28, "patch_size": 4, "dims": 26, "depths": 5, "num_heads": 2, "num_classes": 10}
    return ViT(**{**sizes, **overrides})


@register_model
def vit_small_patch16(**overrides: Any) -> ViT:
    """ViT-S/16 for ImageNet: 22,050,280 parameters at 224 pixels, 1000 classes."""
    return ViT(**{"img_size": 224, "patch_size": 16, "dims": 384, "depths": 12, "num_heads": 6, **overrides})
