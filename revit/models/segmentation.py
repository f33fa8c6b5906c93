r"""Segmentation: a class for each pixel, from masks that turn with the image.

    image [B, C, H, W] --encoder--> maps [B, C_r, G, H/r, W/r], r = 4, 8, 16, 32 --decoder--> [B, C, G, H, W]
                       --head--> logits [B, classes, H, W]

The encoder is the hierarchical REViT without its head. The decoder is that of a U-Net: from the coarsest map on, each is
brought to the size of the next finer one and joined with it (`revit.nn.upsampling`). Finer than the encoder are lifted images.
The head forgets the element at each pixel, so `logits(T_g x) = T_g logits(x)`: exact at every size that the encoder takes.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from revit.deployment import deploy
from revit.models.features import features_by_name
from revit.models.hierarchical import revit_hier_base, revit_hier_small, revit_hier_tiny
from revit.models.pretrained import Pretrained
from revit.models.registry import register_model
from revit.models.revit import REViT
from revit.nn.normalization import make_norm
from revit.nn.pooling import GroupPool, LiftingLayer
from revit.nn.upsampling import UpsampleJoin

FEWEST_FIELDS = 8
"""Of the finest maps: what the classes of a pixel are told apart by."""


class PixelHead(nn.Module):
    """Pools [B, C, G, H, W] over the group, then classifies each pixel with two 1x1 layers: logits [B, num_classes, H, W].

    `num_classes=0` leaves the pooled maps [B, C, H, W].
    """

    def __init__(self, channels: int, num_classes: int, *, hidden: int) -> None:
        super().__init__()
        if num_classes < 0 or hidden < 1:
            raise ValueError(f"a head needs num_classes >= 0 and hidden >= 1, got {num_classes} and {hidden}")
        self.group_pool, self.num_classes = GroupPool("max"), num_classes
        self.hidden: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()
        if num_classes:
            self.hidden = nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.ReLU(inplace=True))
            self.fc = nn.Conv2d(hidden, num_classes, 1)

    def forward(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        x = self.group_pool(x)  # [B, C, H, W]
        return x if pre_logits else self.fc(self.hidden(x))


class REViTSegmenter(nn.Module, Pretrained):
    """A REViT as the encoder of a U-Net: images [B, in_chans, H, W] -> logits [B, num_classes, H, W] that turn with them.

    The encoder loses its head. Below its finest map come lifted images at every power of two, down to the full size.
    """

    task = "segmentation"

    def __init__(self, encoder: REViT, *, num_classes: int, head_hidden: int | None = None) -> None:
        super().__init__()
        encoder.prune_after(encoder.feature_info[-1]["module"])
        self.encoder, self.group, self.in_chans = encoder, encoder.group, encoder.in_chans
        self.dims, self.num_heads, self.min_input_size = encoder.dims, encoder.num_heads, encoder.min_input_size
        first: Any = encoder.stem[0]
        scheme: dict[str, Any] = {"filters": first.conv.filters.filters}

        finest = encoder.reductions[0]
        steps = [2**i for i in range((finest - 1).bit_length())]  # 1, 2 before a quarter
        widths = [max(FEWEST_FIELDS, encoder.dims[0] * step // finest) for step in steps]
        self.details = nn.ModuleList()
        for step, width in zip(steps, widths, strict=True):
            lifting = LiftingLayer(self.group, self.in_chans, width, stride=step, odd=False, strict=True, **scheme)
            self.details.append(nn.Sequential(lifting, make_norm(encoder.norm, width), nn.ReLU(inplace=True)))

        self.reductions = [*steps, *encoder.reductions]
        fields = [*widths, *encoder.dims]  # of the maps that are joined, fine to coarse
        self.num_features = fields[0]
        self.decoder: Any = nn.ModuleList()  # of UpsampleJoin
        for before, width in zip(fields[:0:-1], fields[-2::-1], strict=True):
            self.decoder.append(UpsampleJoin(self.group, before, width, width, norm=encoder.norm, **scheme))
        self.head_hidden = head_hidden or 4 * self.num_features
        self.head: nn.Module = PixelHead(self.num_features, num_classes, hidden=self.head_hidden)

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> feature map [B, C, G, H, W] of the size of the images. By name: those of the encoder, `details.0`, ...,
        `decoder.0` (coarse) to the last one (fine), which is also `pre_class`."""
        found: dict[str, Tensor] = {}
        encoded = self.encoder.forward_features(x, found)
        del found["pre_class"]
        skips = [found[f"stages.{i}.blocks.{len(stage.blocks) - 1}"] for i, stage in enumerate(self.encoder.stages[:-1])]
        for i in reversed(range(len(self.details))):
            found[f"details.{i}"] = self.details[i](x)
        skips = [found[f"details.{i}"] for i in range(len(self.details))] + skips
        for i, (join, skip) in enumerate(zip(self.decoder, reversed(skips), strict=True)):
            found[f"decoder.{i}"] = encoded = join(encoded, skip)
        if features is not None:
            features |= {**found, "pre_class": encoded}
        return encoded

    def forward_head(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Feature map -> logits [B, num_classes, H, W], or the invariant maps [B, C, H, W] with `pre_logits`."""
        out: Tensor = self.head(x, pre_logits=pre_logits)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def named_features(self, x: Tensor) -> dict[str, Tensor]:
        """Every map by name, from `lift` to `pre_class`, then `logits`."""
        return features_by_name(self, x)

    def check_input_size(self, height: int, width: int | None = None) -> dict[str, tuple[int, int]]:
        """The sizes after each layer of the encoder, which raises as `REViT.check_input_size`; the decoder is always exact."""
        return self.encoder.check_input_size(height, width)

    @property
    def num_classes(self) -> int:
        return self.head.num_classes if isinstance(self.head, PixelHead) else 0

    def get_classifier(self) -> nn.Module:
        """The last 1x1 layer (`nn.Identity` without classes)."""
        return self.head.fc if isinstance(self.head, PixelHead) else self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head for another number of classes; 0 makes the model return its invariant maps [B, C, H, W]."""
        like = next(self.parameters())
        head = PixelHead(self.num_features, num_classes, hidden=self.head_hidden)
        self.head = head.to(device=like.device, dtype=like.dtype).train(self.training)

    def deploy(self) -> Self:
        """A copy in plain convolutions with folded norms and the same outputs: the one to ship."""
        return deploy(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trades time for memory in training: blocks of the encoder are computed again in the backward pass."""
        self.encoder.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone: norms, biases and the residual scales."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The maps of `features_only`: those of the decoder, fine to coarse."""
        info = []
        for i, join in reversed(list(enumerate(self.decoder))):
            fields = join.conv[0].out_channels * self.group.order
            reduction = self.reductions[len(self.decoder) - 1 - i]
            info.append({"num_chs": fields, "reduction": reduction, "module": f"decoder.{i}"})
        return info

    def prune_after(self, feature: str) -> None:
        """Removes the head. A finer map is made after a coarser one, so nothing else comes after all of them."""
        self.head = nn.Identity()


def _build(encoder: Any, num_classes: int = 2, head_hidden: int | None = None, **overrides: Any) -> REViTSegmenter:
    return REViTSegmenter(encoder(num_classes=0, **overrides), num_classes=num_classes, head_hidden=head_hidden)


@register_model
def revit_seg_tiny(**overrides: Any) -> REViTSegmenter:
    """A class for each pixel: U-Net decoder on the encoder of revit_hier_tiny."""
    return _build(revit_hier_tiny, **overrides)


@register_model
def revit_seg_small(**overrides: Any) -> REViTSegmenter:
    """A class for each pixel: U-Net decoder on the encoder of revit_hier_small."""
    return _build(revit_hier_small, **overrides)


@register_model
def revit_seg_base(**overrides: Any) -> REViTSegmenter:
    """A class for each pixel: U-Net decoder on the encoder of revit_hier_base."""
    return _build(revit_hier_base, **overrides)
