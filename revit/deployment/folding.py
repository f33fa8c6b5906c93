r"""Batch norms and residual scales go into the weights of the layers beside them.

In eval mode a batch norm is `a[c] x[c] + b[c]` for each field c, which commutes with the group. So it is folded into the
weights of fields, before they are expanded to banks of filters, the same way for every group, filter and algorithm:

    norm after a layer:   W[o] <- a[o] W[o],   bias[o] <- a[o] bias[o] + b[o]
    norm before a 1x1:    bias[o] <- bias[o] + sum_{i,h} W[o,i,h] b[i],   W[o,i] <- a[i] W[o,i]

A norm before a larger convolution is left: the zeros of its padding are added after the norm, and b would not reach them.

Which layers stand beside each other is known here for the layers of `revit.nn` and for `nn.Sequential`. Any other module says
it: `folds` are pairs of its attributes, the second of which is applied directly to the output of the first; `output_of` is the
attribute whose output is that of the module.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revit.nn.attention import GroupConvAttention
from revit.nn.attentive import FeatureAttentiveConv
from revit.nn.block import GroupMLP, TransformerBlock
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv, Pointwise
from revit.nn.normalization import FieldLayerNorm
from revit.nn.pooling import Downsample, LiftingLayer

FOLDABLE = (LiftingConv, GroupConv, GroupLinear, Pointwise, nn.Conv2d, nn.Linear, FieldLayerNorm)
"""Layers whose `weight` and `bias` have the output fields first."""

FOLDS: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {GroupMLP: (("fc1", "norm1"), ("fc2", "norm2"))}
OUTPUT_OF: dict[type[nn.Module], str] = {
    LiftingLayer: "conv",
    Downsample: "conv",
    FeatureAttentiveConv: "conv",
    GroupConvAttention: "proj",
}


def fold(model: nn.Module) -> None:
    """Folds what can be folded, in place. A batch norm that went away is `nn.Identity`, a residual scale is 1."""
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential):
            for first, second in pairwise(list(module._modules)):
                _fold_pair(module, first, second)
        for first, second in FOLDS.get(type(module), getattr(module, "folds", ())):
            _fold_pair(module, first, second)
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            _fold_block(module)


def affine_of(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The scale and shift of a batch norm in eval mode, in float64."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a batch norm without running statistics depends on its batch and cannot be deployed")
    mean, var = norm.running_mean.double(), norm.running_var.double()
    weight = torch.ones_like(mean) if norm.weight is None else norm.weight.detach().double()
    bias = torch.zeros_like(mean) if norm.bias is None else norm.bias.detach().double()
    scale = weight / (var + norm.eps).sqrt()
    return scale, bias - mean * scale


def _fold_pair(owner: nn.Module, first: str, second: str) -> None:
    layer, norm = _output_layer(getattr(owner, first)), getattr(owner, second)
    if isinstance(norm, nn.Sequential) and len(norm):  # a norm and its activation
        owner, second, norm = norm, "0", norm[0]
    if layer is not None and isinstance(norm, _BatchNorm):
        _fold_after(layer, *affine_of(norm))
        setattr(owner, second, nn.Identity())


def _output_layer(module: nn.Module) -> nn.Module | None:
    """The layer whose output is that of a module, if something can be folded into it."""
    if isinstance(module, FOLDABLE):
        return module
    if isinstance(module, nn.Sequential):
        return _output_layer(module[-1]) if len(module) else None
    if isinstance(module, GroupMLP):
        return _output_layer(module.fc2 if isinstance(module.norm2, nn.Identity) else module.norm2)
    name = OUTPUT_OF.get(type(module), getattr(module, "output_of", None))
    return None if name is None else _output_layer(getattr(module, name))


def _fold_block(block: TransformerBlock) -> None:
    """`attn.proj` and the MLP take the scales, and the MLP or a 1x1 projection the norm before it."""
    for branch, scale in ((block.attn, block.scale1), (block.mlp, block.scale2)):
        layer = _output_layer(branch)
        if layer is None:
            raise ValueError(f"deploy() cannot fold the residual scale of a block into its {type(branch).__name__}")
        _fold_after(layer, scale.detach().double(), torch.zeros((), dtype=torch.float64, device=scale.device))
        nn.init.ones_(scale)
    if isinstance(block.norm2, _BatchNorm) and isinstance(block.mlp, GroupMLP):
        _fold_before(block.mlp.fc1, *affine_of(block.norm2))
        block.norm2 = nn.Identity()
    first = _first_layer(block.attn)
    if isinstance(block.norm1, _BatchNorm) and isinstance(first, GroupLinear):
        _fold_before(first, *affine_of(block.norm1))
        block.norm1 = nn.Identity()


def _first_layer(attn: nn.Module) -> nn.Module | None:
    """The layer that reads the input of an attention."""
    if not isinstance(attn, GroupConvAttention):
        return None
    return attn.qkv.mix if isinstance(attn.qkv.depthwise, nn.Identity) else attn.qkv.depthwise


@torch.no_grad()
def _fold_after(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    if isinstance(bias, Tensor) or shift.ndim:
        old = bias.double() if isinstance(bias, Tensor) else torch.zeros((), dtype=torch.float64, device=weight.device)
        layer.bias = nn.Parameter((old * scale + shift).to(weight))
    weight.copy_(weight.double() * scale.view(-1, *[1] * (weight.ndim - 1)))


@torch.no_grad()
def _fold_before(layer: GroupLinear, scale: Tensor, shift: Tensor) -> None:
    weight = layer.weight.double()  # [O, I, G, 1, 1]
    bias = torch.einsum("oigyx,i->o", weight, shift)
    layer.bias = nn.Parameter((bias if layer.bias is None else bias + layer.bias.double()).to(layer.weight))
    layer.weight.copy_(weight * scale.view(-1, 1, 1, 1))
