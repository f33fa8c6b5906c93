"""What a model costs: multiply-adds of one image by formula, as torch counts them, and as parameter counters estimate them.

A formula comes from the layer itself, so that no layer has to be known here: `multiply_adds(height, width)` counts its products
with weights and `attention_multiply_adds(height, width)` those of tokens with each other. Both get the last two sizes of the
output (a layer on tokens [B, N, D] gets N and D). The layers of torch are known. Where formula and counter differ, a layer
computes what no formula tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from revit.evaluation.inference import evaluating, place_of

PRODUCTS_OF_TOKENS = ("attention", "aten.bmm")  # in the names of torch's operations: neither factor is a weight


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one image: products with weights (convolutions, linear layers) and of tokens (attention)."""

    convolution: int
    attention: int
    layers: dict[str, int] = field(default_factory=dict)  # by the name of the layer, from a formula only

    @property
    def total(self) -> int:
        return self.convolution + self.attention


def count_macs(model: nn.Module, image_size: int | tuple[int, int]) -> MultiplyAdds:
    """Multiply-adds of one image by the formulas of the layers. An image is passed through to learn the sizes of the maps."""
    convolution: dict[str, int] = {}
    attention: dict[str, int] = {}
    for name, layer, output in _outputs(model, _image(model, image_size)):
        if isinstance(layer, _ConvNd | nn.Linear):
            convolution[name] = convolution.get(name, 0) + output.numel() * layer.weight[0].numel()
        if hasattr(layer, "multiply_adds"):
            convolution[name] = convolution.get(name, 0) + len(output) * layer.multiply_adds(*output.shape[-2:])
        if hasattr(layer, "attention_multiply_adds"):
            attention[name] = attention.get(name, 0) + len(output) * layer.attention_multiply_adds(*output.shape[-2:])
    by_layer = {name: convolution.get(name, 0) + attention.get(name, 0) for name in {**convolution, **attention}}
    return MultiplyAdds(sum(convolution.values()), sum(attention.values()), by_layer)


def measured_macs(model: nn.Module, x: Tensor) -> MultiplyAdds:
    """Multiply-adds of one image as torch counts them in a forward pass of x [B, C, H, W], half of its "flops".

    Products of a batch of matrices are attention, all others have a weight. torch (2.13) does not count fused attention on
    the CPU; here it is counted. Filter banks are built beforehand: they are the same for every image.
    """
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with evaluating(model):
        model(x)
        with counter:
            model(x)
    tokens = all_products = 0
    for operation, flops in counter.get_flop_counts().get("Global", {}).items():
        all_products += flops
        if any(word in str(operation) for word in PRODUCTS_OF_TOKENS):
            tokens += flops
    halves = 2 * len(x)
    return MultiplyAdds((all_products - tokens) // halves, tokens // halves)


def parameter_macs(model: nn.Module, image_size: int | tuple[int, int]) -> int:
    """What a counter of parameters such as torchinfo makes of one image: the weights of a layer times its output positions.

    A position is a pixel and an element: a field has |G| H W. For free filters this is the number of products with weights; a
    steerable filter is counted by its functions (11 for 5 x 5 pixels), though its pixels are what is multiplied, and attention
    not at all. It is not the cost of the model; the paper's figures grow with the group as this one does.
    """
    total = 0
    for _, layer, output in _outputs(model, _image(model, image_size)):
        if isinstance(layer, nn.Linear):
            total += layer.weight.numel()
        elif isinstance(layer, _ConvNd) or (hasattr(layer, "multiply_adds") and hasattr(layer, "weight")):
            total += layer.weight.numel() * prod(output.shape[2:])
    return total


def _image(model: nn.Module, image_size: int | tuple[int, int]) -> Tensor:
    channels = getattr(model, "in_chans", None)
    if channels is None:
        raise ValueError(f"{type(model).__name__} does not say how many channels its images have: set its attribute in_chans")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(size) < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size!r}")
    device, dtype = place_of(model)
    return torch.zeros(1, channels, *size, device=device, dtype=dtype)


def _outputs(model: nn.Module, x: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
    """Each layer that a forward pass of x calls, by name, with its output: as often as it is called."""
    calls: list[tuple[str, Any, Tensor]] = []
    with evaluating(model), _hooks(model, calls):
        model(x)
    yield from calls


@contextmanager
def _hooks(model: nn.Module, calls: list[tuple[str, Any, Tensor]]) -> Iterator[None]:
    def remember(name: str) -> Any:
        def hook(layer: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                calls.append((name, layer, torch.empty_like(output, device="meta")))

        return hook

    handles = [layer.register_forward_hook(remember(name)) for name, layer in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fused_attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Flops of softmax(Q K^T) V from the shapes [B, heads, queries, D], [B, heads, keys, D] and [B, heads, keys, D']."""
    batch, heads, queries, dim = query
    return 2 * batch * heads * queries * key[2] * (dim + value[3])


def _fused_attention_backward_flops(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """The scores again and their gradient, and the gradients of Q, K and V: three products over D and two over D'."""
    batch, heads, queries, dim = query
    return 2 * batch * heads * queries * key[2] * (3 * dim + 2 * value[3])


UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_attention_backward_flops,
}
"""Formulas for what torch does not count: fused attention on the CPU."""
