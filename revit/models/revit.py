r"""REViT: a lifting stem, transformer blocks with G-CSA, an invariant head. No position encoding anywhere.

    image [B, C, H, W] --stem--> [B, C0, G, H', W'] --stages--> [B, C, G, H", W"] --head--> logits [B, classes]

The flat model of the paper has one stage behind a lifting layer; the hierarchical model (`revit.models.hierarchical`) has four
with down-sampling between. They are the same class with other numbers. `_paper` models have the released code's odd
strided kernels, steerable filters and spatial attention; ours are exact at every size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from revit.deployment import deploy
from revit.groups import Group
from revit.models.features import features_by_name
from revit.models.input_size import check_images, trace_sizes
from revit.models.pretrained import Pretrained
from revit.models.registry import register_model
from revit.nn.attention import ConvProjection, GroupConvAttention
from revit.nn.block import GroupMLP, TransformerBlock, run_checkpointed
from revit.nn.filter_bank import TurnedFilters
from revit.nn.head import InvariantHead
from revit.nn.normalization import make_norm
from revit.nn.pooling import BlurPool, Downsample, LiftingLayer

INITS = ("normal", "released")


class Stage(nn.Module):
    """Down-sampling (nothing in the first stage), then transformer blocks."""

    down: nn.Sequential
    blocks: nn.ModuleList

    def __init__(self, down: nn.Sequential, blocks: list[TransformerBlock]) -> None:
        super().__init__()
        self.down, self.blocks = down, nn.ModuleList(blocks)


class REViT(nn.Module, Pretrained):
    """Roto-reflection equivariant vision transformer: images [B, in_chans, H, W] -> logits [B, num_classes].

    `dims`, `depths` and `num_heads` have one entry per stage; a whole number means a flat model of one stage. `stride` has one
    entry per layer of the stem: `stride=2` is a lifting layer that halves the image, `(2, 2)` a lifting stem, whose inner
    layers have half the fields of the first stage. Attention, projection and filters are those of `GroupConvAttention`.
    `smooth_strides` convolve at every pixel and blur before pixels are left out, for groups with turns of less than 90 degrees.
    `odd_strides`, `elementwise_dropout` and `init="released"` are what the released code does. Where the input size makes
    exact equivariance impossible, the model raises `EquivarianceError`, or warns once if not `strict`.
    """

    def __init__(
        self,
        *,
        group: Group | str = "p4",
        in_chans: int = 3,
        num_classes: int = 1000,
        dims: int | Sequence[int] = 16,
        depths: int | Sequence[int] = 3,
        num_heads: int | Sequence[int] = 2,
        stride: int | Sequence[int] = 2,
        kernel_size: int = 5,
        attention: str = "joint",
        neighbourhood: str = "window",
        window_size: int = 7,
        shift_windows: bool = False,
        kv_reduction: int = 1,
        projection: str = "separable",
        filters: str = "auto",
        norm: str = "batch",
        mlp_ratio: float = 4,
        head_hidden: int | None = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        elementwise_dropout: bool = False,
        odd_strides: bool = False,
        smooth_strides: bool = False,
        init: str = "normal",
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.group = group = Group.parse(group)
        dims, depths, heads = per_stage(dims=dims, depths=depths, num_heads=num_heads)
        strides = positive("stride", stride)
        if any(step != 2 for step in strides[1:]):
            raise ValueError(f"the layers of a stem after the first have stride 2, got stride={strides}")
        if init not in INITS:
            raise ValueError(f"unknown init {init!r}; choose {', '.join(INITS)}")
        self.dims, self.num_heads, self.in_chans, self.num_features = dims, heads, in_chans, dims[-1]
        self.head_hidden, self.drop_rate, self.norm = head_hidden or 4 * dims[-1], drop_rate, norm
        self.grad_checkpointing = False
        self.reductions = [math.prod(strides) * 2**i for i in range(len(dims))]
        self.min_input_size = 2 * self.reductions[0]

        if smooth_strides and odd_strides:
            raise ValueError("smooth_strides and odd_strides exclude each other: choose one")
        scheme: dict[str, Any] = {"odd": odd_strides, "smooth": smooth_strides, "filters": filters, "strict": strict}
        widths = [max(1, dims[0] // 2)] * (len(strides) - 1) + [dims[0]]
        lifting = LiftingLayer(group, in_chans, widths[0], stride=strides[0], **scheme)
        self.stem = nn.Sequential(lifting, make_norm(norm, widths[0]), nn.ReLU(inplace=True))
        self.stem.extend([BlurPool(group, widths[0]) for _ in range(lifting.halvings)])
        for before, after in pairwise(widths):
            self.stem.extend([Downsample(group, before, after, **scheme), make_norm(norm, after), nn.ReLU(inplace=True)])

        rates = iter([drop_path_rate * i / max(1, sum(depths) - 1) for i in range(sum(depths))])
        drop: dict[str, Any] = {"dropout": drop_rate, "elementwise_dropout": elementwise_dropout}
        self.stages: Any = nn.ModuleList()  # of Stage
        for i, (dim, depth, head_count) in enumerate(zip(dims, depths, heads, strict=True)):
            down = nn.Sequential()
            if i > 0:
                down.extend([Downsample(group, dims[i - 1], dim, **scheme), make_norm(norm, dim), nn.ReLU(inplace=True)])
            blocks = []
            for j in range(depth):
                attn = GroupConvAttention(
                    group, dim, head_count, kernel_size=kernel_size, attention=attention, neighbourhood=neighbourhood,
                    window_size=window_size, shifted=shift_windows and j % 2 == 1, kv_reduction=kv_reduction,
                    projection=projection, filters=filters, attn_dropout=attn_drop_rate, strict=strict, **drop,
                )  # fmt: skip
                mlp = GroupMLP(group, dim, ratio=mlp_ratio, norm=norm, **drop)
                blocks.append(TransformerBlock(dim, attn, mlp, norm=norm, drop_path=next(rates)))
            self.stages.append(Stage(down, blocks))

        self.head: nn.Module = InvariantHead(dims[-1], num_classes, hidden=self.head_hidden, dropout=drop_rate, norm=norm)
        if init == "released":
            self._init_as_released()

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> feature map [B, C, G, H', W']. The maps on the way are put into `features` by name, if it is given:
        `lift` after the stem, `stages.0.blocks.0`, ..., and `pre_class`, which is what is returned."""
        check_images(x, self.in_chans, self.min_input_size)

        def keep(name: str, x: Tensor) -> Tensor:
            if features is not None:
                features[name] = x
            return x

        x = keep("lift", self.stem(x))
        for i, stage in enumerate(self.stages):
            x = stage.down(x)
            for j, block in enumerate(stage.blocks):
                x = run_checkpointed(block, x, [block]) if self.grad_checkpointing and self.training else block(x)
                x = keep(f"stages.{i}.blocks.{j}", x)
        return keep("pre_class", x)

    def forward_head(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Feature map -> logits [B, num_classes], or the invariant features [B, C] with `pre_logits`."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def named_features(self, x: Tensor) -> dict[str, Tensor]:
        """Every map by name, from `lift` to `pre_class`, then `logits`."""
        return features_by_name(self, x)

    def check_input_size(self, height: int, width: int | None = None) -> dict[str, tuple[int, int]]:
        """The size of the map after each layer for an input size (square if only the height is given).

        Raises `EquivarianceError` naming the layer that cannot be exact there and the nearest input sizes that are (a model
        that is not strict warns), and `ValueError` below the minimum size.
        """
        return trace_sizes(self, (height, height if width is None else width), self.min_input_size)

    def _init_as_released(self) -> None:
        """The start of the released code: each convolution an orthogonal map at its centre pixel, small classifiers."""
        projections = [module.mix.filters for module in self.modules() if isinstance(module, ConvProjection)]
        for module in self.modules():
            if isinstance(module, TurnedFilters) and module.kernel_size % 2:
                module.reset_delta_orthogonal(parts=3 if module in projections else 1)
            elif isinstance(module, nn.Linear):
                if len(self.stages) > 1:
                    nn.init.trunc_normal_(module.weight, std=0.02)
                else:
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                    with torch.no_grad():
                        module.weight.mul_(0.1)
                nn.init.zeros_(module.bias)

    @property
    def num_classes(self) -> int:
        return self.head.num_classes if isinstance(self.head, InvariantHead) else 0

    def get_classifier(self) -> nn.Module:
        """The last linear layer (`nn.Identity` without classes)."""
        return self.head.fc if isinstance(self.head, InvariantHead) else self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head for another number of classes; 0 makes the model return its invariant features [B, C]."""
        like = next(self.stem.parameters())
        head = InvariantHead(self.num_features, num_classes, hidden=self.head_hidden, dropout=self.drop_rate, norm=self.norm)
        self.head = head.to(device=like.device, dtype=like.dtype).train(self.training)

    def deploy(self, image_size: int | tuple[int, int] | None = None) -> Self:
        """A copy in plain convolutions with folded norms and the same outputs: the one to ship."""
        return deploy(self, image_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trades time for memory in training: blocks are computed again in the backward pass."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone: norms, biases and the residual scales."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The maps of `features_only`: after each block of a flat model, after each stage of a hierarchical one."""
        flat = len(self.stages) == 1
        info = []
        for i, stage in enumerate(self.stages):
            for j in range(len(stage.blocks)) if flat else [len(stage.blocks) - 1]:
                fields = stage.blocks[j].attn.channels
                name, reduction = f"stages.{i}.blocks.{j}", self.reductions[i]
                info.append({"num_chs": fields * self.group.order, "reduction": reduction, "module": name})
        return info

    def prune_after(self, feature: str) -> None:
        """Removes the head and all that comes after a feature named in `feature_info`."""
        _, i, _, j = feature.split(".")
        self.stages = self.stages[: int(i) + 1]
        self.stages[-1].blocks = self.stages[-1].blocks[: int(j) + 1]
        self.head = nn.Identity()


def positive(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    if not values or any(not isinstance(v, int) or isinstance(v, bool) or v < 1 for v in values):
        raise ValueError(f"{name} must be whole numbers >= 1, got {value!r}")
    return values


def per_stage(**options: int | Sequence[int]) -> list[tuple[int, ...]]:
    values = {name: positive(name, value) for name, value in options.items()}
    if len({len(value) for value in values.values()}) != 1:
        raise ValueError(f"the same number of stages is needed in {', '.join(f'{n}={v}' for n, v in values.items())}")
    return list(values.values())


# Sizes. The group is an argument: `create_model("revit_small", group="p4m", in_chans=3, num_classes=2)`.

PAPER: dict[str, Any] = {
    "attention": "spatial",
    "neighbourhood": "global",
    "projection": "full",
    "filters": "steerable",
    "odd_strides": True,
    "elementwise_dropout": True,
    "init": "released",
}
"""What the released code does in every model; the paper's counts and errors come from these choices."""

PAPER_FLAT = {**PAPER, "num_classes": 10, "drop_rate": 0.1, "attn_drop_rate": 0.1}


@register_model
def revit_tiny(**overrides: Any) -> REViT:
    """About 44K parameters at p4 and one channel."""
    return REViT(**{"dims": 16, "depths": 3, "num_heads": 2, "head_hidden": 32, "num_classes": 10, **overrides})


@register_model
def revit_small(**overrides: Any) -> REViT:
    """About 100K parameters at p4 and one channel."""
    return REViT(**{"dims": 24, "depths": 3, "num_heads": 2, "num_classes": 10, **overrides})


@register_model
def revit_base(**overrides: Any) -> REViT:
    """About 1.1M parameters at p4m and three channels."""
    return REViT(**{"dims": 40, "depths": 7, "num_heads": 4, "num_classes": 10, **overrides})


def _paper_flat(**options: Any) -> REViT:
    return REViT(**{**PAPER_FLAT, "head_hidden": max(1, positive("dims", options["dims"])[-1] // 2), **options})


@register_model
def revit_tiny_paper(**overrides: Any) -> REViT:
    """The paper's 44K model (Table 1): 44,282 parameters with group="z2", dims=16, stride=1, in_chans=1."""
    return _paper_flat(**{"dims": 8, "depths": 4, "num_heads": 4, **overrides})


@register_model
def revit_small_paper(**overrides: Any) -> REViT:
    """The paper's 98K model (Table 3): 97,704 parameters with group="p4", stride=1, in_chans=1."""
    return _paper_flat(**{"dims": 12, "depths": 4, "num_heads": 6, **overrides})


@register_model
def revit_base_paper(**overrides: Any) -> REViT:
    """The paper's 1.12M model (Table 3, CIFAR-10): 1,123,380 parameters with group="p4m", stride=1."""
    return _paper_flat(**{"dims": 36, "depths": 4, "num_heads": 6, "kernel_size": 3, **overrides})
