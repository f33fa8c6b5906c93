"""Attentive G-CNNs of Romero et al. (2020): the networks of `revit.models.gcnn` and `revit.models.densenet` with attention in
every convolution, the classifier's too.

For rotated MNIST the attention is inside the convolutions, another one for every output field ("alpha"). For PatchCamelyon that
would take too much memory: there attention is paid to the input of each convolution ("alpha_F").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from revit.groups import Group
from revit.models.densenet import gcnn_pcam
from revit.models.gcnn import GCNN, ConvHead, gcnn_rotmnist
from revit.models.registry import register_model
from revit.nn.attentive import AttentiveConv, FeatureAttentiveConv

Attend = Callable[[Any], nn.Module]
"""Puts attention into a convolution."""

PCAM_SPATIAL = ((7, 4), (7, 4), (7, 4), (7, 4), (7, 4), (7, 3), (7, 3), (7, 2), (7, 1), (5, 1), (3, 1))
"""Kernel size and dilation of the attention to positions: lifting, (block, transition) four times, last block, classifier."""


def put_attention(model: Any, into_layers: Sequence[Attend], into_head: Attend) -> GCNN:
    """The model with attention in its convolutions: one of `into_layers` for each layer that has a convolution."""
    layers = [layer for layer in model.layers if hasattr(layer, "conv")]
    for layer, attend in zip(layers, into_layers, strict=True):
        layer.conv = attend(layer.conv)
    model.make_head = partial(attentive_head, model.make_head, into_head)
    model.head = model.make_head(model.num_classes)
    return model


def attentive_head(make_head: Callable[[int], ConvHead], attend: Attend, num_classes: int) -> ConvHead:
    head = make_head(num_classes)
    if num_classes:
        head.fc = attend(head.fc)
    return head


@register_model
def attentive_gcnn_rotmnist(
    *, group: Group | str = "p4", in_chans: int = 1, num_classes: int = 10, dims: int | Sequence[int] = 10,
    filters: str = "auto", norm: str = "batch", drop_rate: float = 0.0, elementwise_dropout: bool = False,
) -> GCNN:  # fmt: skip
    """Seven attentive layers for 28 pixels, attention for each output field: 73,130 parameters (p4, 10 fields).

    The layers of `gcnn_rotmnist`. Half as many hidden numbers as input fields weigh the fields (in the first layer as many as
    channels), 7 x 7 filters the positions. The published layers also scale their sum by 2 pi / |G|, which the norms undo.
    """
    model: Any = gcnn_rotmnist(
        group=group, in_chans=in_chans, num_classes=num_classes, dims=dims, filters=filters, norm=norm, drop_rate=drop_rate,
        elementwise_dropout=elementwise_dropout,
    )  # fmt: skip
    attend = partial(AttentiveConv, filters=filters)
    first, others = partial(attend, hidden=in_chans), partial(attend, hidden=max(1, model.num_features // 2))
    return put_attention(model, [first, *[others] * 5], others)


@register_model
def attentive_gcnn_pcam(
    *, group: Group | str = "p4", in_chans: int = 3, num_classes: int = 2, dims: int | Sequence[int] = 13,
    filters: str = "auto", norm: str = "batch",
) -> GCNN:  # fmt: skip
    """DenseNet for 96 pixels, attention to each convolution's input: 140,453 parameters (p4, growth 13), 141,221 (p4m, 9).

    The layers of `gcnn_pcam`. Two hidden fields weigh the fields (in the first layer as many as channels), filters of 7 x 7
    pixels the positions: dilated by 4 at first, then by 3, 2 and 1; 5 x 5 in the last block, 3 x 3 in the classifier.
    """
    model: Any = gcnn_pcam(group=group, in_chans=in_chans, num_classes=num_classes, dims=dims, filters=filters, norm=norm)
    attends = [
        partial(FeatureAttentiveConv, hidden=2 if i else in_chans, kernel_size=kernel_size, dilation=dilation, filters=filters)
        for i, (kernel_size, dilation) in enumerate(PCAM_SPATIAL)
    ]
    return put_attention(model, attends[:-1], attends[-1])
