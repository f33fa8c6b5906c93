"""`deploy(model)`: the same function in plain convolutions and matrix products. The way to ship a model.

A deployed model is a copy with filters expanded once, batch norms and residual scales folded into them, and no dropout. It
gives the same outputs and features, and refuses the same sizes. Its parameters ask for no gradient and it has no mode:
`train()` changes nothing. Train the model itself, and deploy it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from revit.deployment.canonical import BitExact
from revit.deployment.choice import fix_algorithms
from revit.deployment.folding import affine_of, fold
from revit.deployment.layers import (
    FieldAffine,
    PlainAttentiveConv,
    PlainBlock,
    PlainConv,
    PlainFourier,
    PlainRelativeAttention,
)
from revit.nn.attentive import AttentiveConv
from revit.nn.block import TransformerBlock
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv, Pointwise
from revit.nn.dropout import DropPath
from revit.nn.filter_bank import TurnedFilters
from revit.nn.normalization import FieldLayerNorm
from revit.nn.relative_attention import RelativeSelfAttention

__all__ = ["bit_exact", "deploy"]

Model = TypeVar("Model", bound=nn.Module)


def deploy(model: Model, image_size: int | tuple[int, int] | None = None) -> Model:
    """A copy of a model in plain convolutions and matrix products, with the same outputs; the model itself stays as it is.

    Layers that choose their algorithm (`revit.nn.algorithm`) are fixed to `dense`, or with an `image_size` to what is faster
    for images of that size on a CPU. The copy takes other sizes as well.

    >>> from revit import create_model
    >>> model = create_model("revit_tiny", group="p4", in_chans=1)
    >>> plain = deploy(model)
    >>> sorted({type(layer).__name__ for layer in plain.modules() if next(layer.parameters(False), None) is not None})
    ['Conv2d', 'FieldAffine', 'Linear']

    A deployed model deployed again is a copy of it. Raises `ValueError` for a module that it does not know: one that has
    parameters or buffers of its own and no attribute `folds` (see `revit.deployment.folding`).
    """
    plain = copy.deepcopy(model).eval()
    if image_size is not None:
        fix_algorithms(plain, image_size)
    fold(plain)
    plain = _plain(plain, "")
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return plain.eval()


def bit_exact(model: nn.Module, *, one_by_one: bool = False) -> BitExact:
    """A deployed copy of a model that gives every turn and mirror of an image the same answer, to the last bit.

    For p4, p4m and their subgroups these are all elements of the group, for others (p8, p12m, ...) those that move pixels onto
    pixels. Maps turn with the image, as exactly. The outputs are those of the model up to rounding, at the cost of one pass and
    a few comparisons. With `one_by_one` images go through the model singly, and an answer does not depend on its batch. Same
    bits need the same machine, torch and number of threads. The copy is for inference: save the model, and make it anew.

    >>> import torch
    >>> from revit import create_model
    >>> exact = bit_exact(create_model("revit_tiny", group="p4m", in_chans=1))
    >>> x = torch.randn(2, 1, 28, 28)
    >>> torch.equal(exact(torch.rot90(x, 1, (2, 3))), exact(x))
    True
    """
    if isinstance(model, BitExact):
        model = model.model
    return BitExact(deploy(model), one_by_one=one_by_one)


def algorithm_of(layer: GroupConv | GroupLinear) -> str:
    """The algorithm that a deployed layer runs: dense, unless the layer is fixed to another."""
    return "fourier" if layer.algorithm.name == "fourier" else "dense"


def _convolution(layer: Any) -> nn.Module:
    return PlainFourier(layer) if algorithm_of(layer) == "fourier" else PlainConv(layer)


def _relative_attention(layer: RelativeSelfAttention) -> nn.Module:
    """Attention to the whole map has encodings that depend on its size, so their small networks stay."""
    return layer if layer.patch_size is None else PlainRelativeAttention(layer)


PLAIN: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    LiftingConv: PlainConv,
    GroupConv: _convolution,
    GroupLinear: _convolution,
    AttentiveConv: PlainAttentiveConv,
    RelativeSelfAttention: _relative_attention,
    TransformerBlock: PlainBlock,
    DropPath: lambda _: nn.Identity(),
}
"""What becomes of a layer of ours."""

KEPT = (
    PlainFourier,
    PlainAttentiveConv,
    PlainRelativeAttention,
    FieldAffine,
    RelativeSelfAttention,
    Pointwise,
    FieldLayerNorm,
)
"""Layers with weights of their own that are plain already."""


def _plain(module: Any, name: str) -> Any:
    """The plain counterpart of a module and of all that is in it."""
    if isinstance(module, _DropoutNd):
        return nn.Identity()
    if isinstance(module, _BatchNorm):
        scale, shift = affine_of(module)
        return FieldAffine(scale.to(module.running_mean), shift.to(module.running_mean))
    module = PLAIN.get(type(module), lambda same: same)(module)
    _check(module, name)
    for child_name, child in list(module.named_children()):
        setattr(module, child_name, _plain(child, f"{name}.{child_name}".lstrip(".")))
    for switch in ("attn_dropout", "grad_checkpointing"):
        if hasattr(module, switch):
            setattr(module, switch, type(getattr(module, switch))(0))
    return module


def _check(module: nn.Module, name: str) -> None:
    """Refuses what might be no plain layer. Modules that only call others are what these are."""
    kind = type(module)
    if any(isinstance(child, TurnedFilters) for child in module.children()):
        raise ValueError(f"deploy() does not know the layer {kind.__name__} ({name or 'the model'}), which turns filters")
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    known = kind.__module__.startswith("torch.nn.") or isinstance(module, KEPT) or hasattr(module, "folds")
    if own and not known:
        raise ValueError(
            f"deploy() does not know {kind.__name__} ({name or 'the model'}) and its {own[0][0]};"
            " if that is an ordinary weight, give the class an attribute folds = ()"
        )
