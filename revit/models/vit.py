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
from revit.models.input_size import check_images
from revit.models.registry import register_model
from revit.models.revit import positive
from revit.models.tokens import Block, TokenTransformer, as_map, check_heads, check_plain, classifier, start_small
from revit.nn.block import run_checkpointed
from revit.nn.dropout import check_rate


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


class ViT(TokenTransformer):
    """Plain vision transformer: images [B, in_chans, H, W] -> logits [B, num_classes], equivariant to nothing.

    `dims` is the width of the tokens, `depths` the number of blocks. The table of positions has one entry for each patch of an
    image of `img_size`; images of another size get it resized (bicubic), so every size that `patch_size` divides works. `pool`
    is what the classifier reads: the class `token`, or the `mean` over the patches (then there is no class token). `group` is
    there because every model takes one; it can only be z2.
    """

    kind = "a plain ViT"

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
        self.group = check_plain(self.kind, group, pool)
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
                features[name] = as_map(tokens, size)
            return tokens

        patches = self.patch_embed(x)  # [B, D, H', W']
        keep("lift", patches.flatten(2).transpose(1, 2))
        tokens = (patches + self._positions(size)).flatten(2).transpose(1, 2)  # [B, H'*W', D]
        if self.cls_token is not None:
            tokens = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), tokens), dim=1)
        tokens = self.pos_drop(tokens)
        for i, block in enumerate(self.blocks):
            tokens = run_checkpointed(block, tokens, [block]) if self.grad_checkpointing and self.training else block(tokens)
            keep(f"blocks.{i}", tokens)
        return keep("pre_class", self.norm(tokens))

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

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trades time for memory in training: blocks are computed again in the backward pass."""
        self.grad_checkpointing = enable


def _one(name: str, value: int | Sequence[int]) -> int:
    values = positive(name, value)
    if len(values) > 1:
        raise ValueError(f"a plain ViT has one stage, got {name}={values}")
    return values[0]


@register_model
def vit_tiny(**overrides: Any) -> ViT:
    """A plain ViT of the size of the paper's smallest models: 44,314 parameters for 28 x 28 x 1, 10 classes."""
    sizes = {"img_size": 28, "patch_size": 4, "dims": 26, "depths": 5, "num_heads": 2, "num_classes": 10}
    return ViT(**{**sizes, **overrides})


@register_model
def vit_small_patch16(**overrides: Any) -> ViT:
    """ViT-S/16 for ImageNet: 22,050,280 parameters at 224 pixels, 1000 classes."""
    return ViT(**{"img_size": 224, "patch_size": 16, "dims": 384, "depths": 12, "num_heads": 6, **overrides})
