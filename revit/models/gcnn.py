"""G-CNNs of Cohen and Welling (2016), the convolutional baselines: a lifting layer, group convolutions, an invariant head.

    image [B, C, H, W] --lift--> [B, C0, G, H', W'] --layers--> [B, C, G, H", W"] --head--> logits [B, classes]

All are one class with other layers: the seven-layer network for rotated MNIST is here, All-CNN-C for CIFAR-10 in
`revit.models.allcnn`, the DenseNet for PatchCamelyon in `revit.models.densenet`. The classifier is a last group convolution
whose fields are the classes; pooling comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from revit.deployment import deploy
from revit.exactness import EquivarianceError, next_multiple
from revit.groups import Group
from revit.models.features import features_by_name
from revit.models.input_size import check_images
from revit.models.pretrained import Pretrained
from revit.models.registry import register_model
from revit.models.revit import positive
from revit.nn.convolution import GroupConv, LiftingConv
from revit.nn.dropout import make_dropout
from revit.nn.normalization import make_norm
from revit.nn.pooling import GroupPool, fit_to_stride


class HalvingPool(nn.Module):
    """`max` or `mean` over 2 x 2 pixels: [B, C, G, H, W] -> [B, C, G, ceil(H/2), ceil(W/2)], exact at every size."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.pool = nn.MaxPool3d((1, 2, 2)) if mode == "max" else nn.AvgPool3d((1, 2, 2))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return next_multiple(height, 2) // 2, next_multiple(width, 2) // 2

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(fit_to_stride(x, 2))


class HalvingConv(nn.Module):
    """3 x 3 group convolution with stride 2 and padding 1: [B, C_in, G, H, W] -> [B, C_out, G, ceil(H/2), ceil(W/2)].

    `odd=True` is that and no more, exact at odd sizes only. `odd=False` (exact at every size) first averages pairs of
    neighbours along each even axis: n pixels become n - 1, which the stride samples symmetrically, and the output has the same
    n/2 pixels. Both together are a 4 x 4 kernel with the parameters of a 3 x 3 one.
    """

    output_of = "conv"

    def __init__(
        self, group: Group, in_channels: int, out_channels: int, *, odd: bool, bias: bool, filters: str, strict: bool
    ) -> None:
        super().__init__()
        self.odd, self.out_channels = odd, out_channels
        self.conv = GroupConv(
            group, in_channels, out_channels, 3, stride=2, padding=1, bias=bias, filters=filters, strict=strict
        )

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.conv.output_size(height + 1 - self._pair(height), width + 1 - self._pair(width))

    def forward(self, x: Tensor) -> Tensor:
        pairs = (1, self._pair(x.shape[-2]), self._pair(x.shape[-1]))
        return self.conv(x if pairs == (1, 1, 1) else F.avg_pool3d(x, pairs, stride=1))

    def _pair(self, size: int) -> int:
        return 1 if self.odd or size % 2 else 2


class ConvLayer(nn.Module):
    """Convolution, norm and ReLU; then 2 x 2 max-pooling and dropout. All but the convolution can be missing."""

    folds = (("conv", "norm"),)

    def __init__(
        self, conv: LiftingConv | GroupConv | HalvingConv, norm: str | None, *, halve: bool = False,
        dropout: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv, self.norm = conv, norm_and_relu(norm, conv.out_channels)
        self.pool = HalvingPool("max") if halve else None
        self.drop = dropout or nn.Identity()
        self.out_channels = conv.out_channels
        self.stride = 2 if halve or isinstance(conv, HalvingConv) else 1

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.conv.output_size(height, width)
        return size if self.pool is None else self.pool.output_size(*size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return self.drop(x if self.pool is None else self.pool(x))


class ConvHead(nn.Module):
    """Classes as fields of a last group convolution, then pooling over space and over the group: invariant logits [B, classes].

    `norm` adds a norm and ReLU between the two, as All-CNN-C has. `num_classes=0` leaves the pooled features [B, C].
    """

    folds = (("fc", "norm"),)

    def __init__(
        self, group: Group, channels: int, num_classes: int, *, kernel_size: int = 1, bias: bool = False,
        norm: str | None = None, filters: str = "auto", spatial_pool: str = "mean", group_pool: str = "max",
    ) -> None:  # fmt: skip
        super().__init__()
        if num_classes < 0:
            raise ValueError(f"a head needs num_classes >= 0, got {num_classes}")
        self.num_classes, self.spatial_pool, self.group_pool = num_classes, spatial_pool, GroupPool(group_pool)
        self.fc: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if num_classes:
            self.fc = GroupConv(group, channels, num_classes, kernel_size, bias=bias, filters=filters)
            self.norm = norm_and_relu(norm, num_classes)

    def forward(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        x = x if pre_logits else self.norm(self.fc(x))
        x = x.amax(dim=(-2, -1), keepdim=True) if self.spatial_pool == "max" else x.mean(dim=(-2, -1), keepdim=True)
        return self.group_pool(x).flatten(1)


class GCNN(nn.Module, Pretrained):
    """Group equivariant convolutional network: images [B, in_chans, H, W] -> logits [B, num_classes].

    `layers` map features to features, the first one an image to features; each has `output_size`, `out_channels` and `stride`.
    `make_head` builds the head for a number of classes, which has `num_classes` and `fc`. `dims` are the widths that the model
    was built with.
    """

    def __init__(
        self, group: Group, layers: Sequence[Any], make_head: Callable[[int], nn.Module], *, in_chans: int,
        num_classes: int, dims: tuple[int, ...], min_input_size: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.in_chans, self.dims, self.min_input_size = group, in_chans, dims, min_input_size
        self.num_heads = (1,) * len(dims)  # widths come in steps of one (`--match-params`)
        self.layers: Any = nn.ModuleList(layers)
        self.num_features: int = layers[-1].out_channels
        self.make_head = make_head
        self.head: nn.Module = make_head(num_classes)

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Images -> feature map [B, C, G, H', W']. The maps on the way are put into `features` by name, if it is given:
        `lift`, `layers.1`, ..., and `pre_class`, the map that the classifier reads, which is what is returned."""
        check_images(x, self.in_chans, self.min_input_size)
        for name, layer in zip(self._names(), self.layers, strict=True):
            x = layer(x)
            if features is not None:
                features[name] = x
        if features is not None:
            features["pre_class"] = x
        return x

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
        size = height, height if width is None else width
        least = self.min_input_size
        if min(size) < least:
            raise ValueError(f"images of {size[0]} x {size[1]} are below the minimum of {least} x {least} of this model")
        sizes: dict[str, tuple[int, int]] = {}
        current = size
        for name, layer in zip(self._names(), self.layers, strict=True):
            try:
                sizes[name] = current = layer.output_size(*current)
            except EquivarianceError as error:
                nearest = [" and ".join(map(str, self._exact_sizes_near(side))) for side in size]
                text = nearest[0] if nearest[0] == nearest[1] else f"height {nearest[0]}, width {nearest[1]}"
                raise EquivarianceError(f"{name}: {error}. Nearest exact input sizes of the model: {text}") from error
        return sizes

    def _exact_sizes_near(self, size: int) -> list[int]:
        """The nearest exact input sizes on one axis: the size itself if it is one, else one below and one above."""

        def exact(side: int) -> bool:
            sides = side, side
            try:
                for layer in self.layers:
                    sides = layer.output_size(*sides)
            except EquivarianceError:
                return False
            return True

        if exact(size):
            return [size]
        below = [side for side in range(self.min_input_size, size) if exact(side)]
        above = (side for side in range(size + 1, 2 * size + 128) if exact(side))
        return [*below[-1:], *islice(above, 1)]

    def _names(self) -> list[str]:
        return ["lift", *(f"layers.{i}" for i in range(1, len(self.layers)))]

    @property
    def num_classes(self) -> int:
        return getattr(self.head, "num_classes", 0)

    def get_classifier(self) -> nn.Module:
        """The layer that gives the classes (`nn.Identity` without them)."""
        return getattr(self.head, "fc", self.head)

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head for another number of classes; 0 makes the model return its invariant features [B, C]."""
        like = next(self.layers.parameters())
        self.head = self.make_head(num_classes).to(device=like.device, dtype=like.dtype).train(self.training)

    def deploy(self, image_size: int | tuple[int, int] | None = None) -> Self:
        """A copy in plain convolutions with folded norms and the same outputs: the one to ship."""
        return deploy(self, image_size)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone: norms and biases."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The maps of `features_only`: after each layer. Unpadded layers also cut a border, which `reduction` leaves out."""
        info, reduction = [], 1
        for name, layer in zip(self._names(), self.layers, strict=True):
            reduction *= layer.stride
            info.append({"num_chs": layer.out_channels * self.group.order, "reduction": reduction, "module": name})
        return info

    def prune_after(self, feature: str) -> None:
        """Removes the head and all that comes after a feature named in `feature_info`."""
        self.layers = self.layers[: self._names().index(feature) + 1]
        self.head = nn.Identity()


@register_model
def gcnn_rotmnist(
    *, group: Group | str = "p4", in_chans: int = 1, num_classes: int = 10, dims: int | Sequence[int] = 10,
    filters: str = "auto", norm: str = "batch", drop_rate: float = 0.0, elementwise_dropout: bool = False,
) -> GCNN:  # fmt: skip
    """Seven layers for 28 pixels: 21,750 parameters (z2, 20 fields), 24,610 (p4, 10), 77,539 (p4, 19), 77,753 (p8, 13).

    Six 3 x 3 convolutions without padding, max-pooling after the second, then a 4 x 4 convolution to the classes and the
    maximum over space and group. As published, the plain network (z2) has biases and the others have none; dropout follows
    layers 1, 3, 4, 5 and 6. Where free pixels cannot turn (p8, ...), `filters="auto"` keeps the published number of parameters:
    Gaussians for the 3 x 3 filters, which have nine too, and interpolated pixels for the 4 x 4 ones, where Gaussians would have
    12 instead of 16. `filters="rbf"` (73,593 at p8, 13) has Gaussians everywhere and turns better.
    """
    group = Group.parse(group)
    (width,) = widths(dims, 1)
    options: dict[str, Any] = {"bias": group.order == 1, "filters": filters}
    layers = []
    for i in range(6):
        conv = GroupConv(group, width, width, 3, **options) if i else LiftingConv(group, in_chans, width, 3, **options)
        dropout = make_dropout(drop_rate if i != 1 else 0.0, elementwise=elementwise_dropout)
        layers.append(ConvLayer(conv, norm, halve=i == 1, dropout=dropout))
    if filters == "auto" and not group.is_exact:
        options["filters"] = "interpolate"
    make_head = partial(ConvHead, group, width, kernel_size=4, spatial_pool="max", **options)
    return GCNN(group, layers, make_head, in_chans=in_chans, num_classes=num_classes, dims=(width,), min_input_size=27)


def norm_and_relu(norm: str | None, channels: int) -> nn.Module:
    return nn.Identity() if norm is None else nn.Sequential(make_norm(norm, channels), nn.ReLU(inplace=True))


def widths(dims: int | Sequence[int], count: int) -> tuple[int, ...]:
    values = positive("dims", dims)
    if len(values) != count:
        raise ValueError(f"this network has {count} width{'s' * (count > 1)}, got dims={values}")
    return values
