r"""State dicts of the released code as `_paper` models of ours.

Both have the same layers, so converting is renaming, and changing the functions of convolutions (`revit.conversion.filters`):

| released, flat           | released, windowed            | ours                                  |
|--------------------------|-------------------------------|---------------------------------------|
| `lift.conv`, `lift.bn`   | `stem.net.0`, `stem.net.1`    | `stem.0.conv`, `stem.1`               |
|                          | `stem.net.3`, `stem.net.4`    | `stem.3.conv`, `stem.4`               |
| `blocks.J`               | `stages.I.blocks.J`           | `stages.I.blocks.J`, inside: `_CONVS`, `_NORMS`, `_SCALES` |
|                          | `stages.I.downsample.conv`, `.bn` | `stages.I+1.down.0.conv`, `stages.I+1.down.1` |
| `head.fc1`, `.bn`, `.fc2`| `head.fc1`, `.bn1`, `.fc2`    | `head.hidden.0`, `head.hidden.1`, `head.fc` |

A convolution has `weights` (coefficients), the sampled functions that they weigh and, if saved in eval mode, its `filter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revit.conversion.convolutions import Convolutions, find_group, find_kernel_size, lifting_banks
from revit.conversion.state import ConversionError, StateReader
from revit.models import create_model

_CONVS = {
    "attn.qkv.mix": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.proj": ("attn.to_out",),
    "mlp.fc1": ("mlp.net.0",),
    "mlp.fc2": ("mlp.net.4",),
}
_NORMS = {"norm1": "norm1", "norm2": "norm2", "mlp.norm1": "mlp.net.1", "mlp.norm2": "mlp.net.5"}
_SCALES = {"scale1": "alpha1", "scale2": "alpha2"}
_STATISTICS = ("weight", "bias", "running_mean", "running_var")
_HEADS: dict[tuple[int, ...], tuple[int, ...]] = {
    (12, 24, 48, 96): (1, 2, 4, 8),
    (24, 48, 96, 192): (1, 2, 4, 8),
    (32, 64, 128, 256): (1, 2, 4, 8),
    (64, 128, 256, 512): (2, 4, 8, 16),
    (64, 128, 192, 384): (2, 4, 8, 16),
}
"""Heads of the presets of the released ImageNet code by the fields of their stages: a state dict does not tell."""


@dataclass(frozen=True)
class Converted:
    """A model of ours with the weights of a released one, in eval mode."""

    model: nn.Module
    name: str  # of the registered model
    arguments: dict[str, Any]  # what it was built with, besides `in_chans` and `num_classes`
    in_chans: int
    num_classes: int
    leftover: float  # largest error of an expanded filter, relative to its largest value


@dataclass(frozen=True)
class _Layout:
    """Where the layers of a released model are: (convolution, norm) of the stem and between stages, and blocks by stage."""

    windowed: bool
    stem: list[tuple[str, str]]
    blocks: list[str]
    between: list[tuple[str, str]]
    head_norm: str


def convert_released(
    tensors: Mapping[str, Tensor], *, num_heads: int | Sequence[int] | None = None, window_size: int = 7,
    num_classes: int | None = None,
) -> Converted:  # fmt: skip
    """Builds the model whose state dict this is. Raises `ConversionError` that names a key that is missing, unknown or wrong.

    Group, fields, depths, kernels, strides, channels and classes are read from the tensors. The heads are not in them (those of
    the released presets are known), nor is the size of the windows. `num_classes` keeps the first outputs only: the released
    code gives ten to every small dataset, also to one of two classes.
    """
    state = StateReader(tensors)
    layout = _layout(state)
    depths = [state.count(f"{blocks}.*.") for blocks in layout.blocks]
    dims = [state.fields_of(f"{blocks}.0.norm1") for blocks in layout.blocks]
    ratio = state.fields_of(f"{layout.blocks[0]}.0.{_NORMS['mlp.norm1']}") // dims[0]
    lifted = lifting_banks(state, layout.stem[0][0])  # [F, G, K, K]
    group = find_group(lifted, layout.stem[0][0])
    kernel_size = find_kernel_size(state, f"{layout.blocks[0]}.0.attn.to_q")
    arguments: dict[str, Any] = {
        "group": group.name,
        "dims": dims if layout.windowed else dims[0],
        "depths": depths if layout.windowed else depths[0],
        "num_heads": _heads(num_heads, dims, windowed=layout.windowed),
        "stride": [2] * len(layout.stem) if layout.windowed else lifted.shape[-1] // 2,
        "kernel_size": kernel_size,
        "mlp_ratio": ratio,
        "head_hidden": state.length("head.fc1.bias"),
        "strict": False,
        "init": "normal",  # the released start takes minutes for large models, and each loading would repeat it
    }
    if layout.windowed:
        arguments["window_size"] = window_size

    dtype = state.peek(f"{layout.blocks[0]}.0.alpha1").dtype
    convolutions = Convolutions(state, group)
    weights = _stem(state, layout, convolutions, 5 if layout.windowed else lifted.shape[-1], dims[0])
    for i, (blocks, depth, dim) in enumerate(zip(layout.blocks, depths, dims, strict=True)):
        for j in range(depth):
            weights |= _block(state, convolutions, f"{blocks}.{j}", f"stages.{i}.blocks.{j}", dim, ratio, kernel_size)
    for i, (conv, norm) in enumerate(layout.between):
        weights[f"stages.{i + 1}.down.0.conv.filters.weight"] = convolutions.take(conv, dims[i + 1], dims[i], 3)
        weights |= _norm(state, norm, f"stages.{i + 1}.down.1", dims[i + 1])
    weights |= _head(state, layout.head_norm, dims[-1], num_classes)
    state.finish()

    name = "revit_hier_small_paper" if layout.windowed else "revit_small_paper"
    in_chans, classes = weights["stem.0.conv.filters.weight"].shape[1], len(weights["head.fc.bias"])
    model = create_model(name, in_chans=in_chans, num_classes=classes, **arguments)
    model.to(torch.promote_types(dtype, torch.float32))
    model.load_state_dict({key: weights[key].reshape(value.shape).to(value.dtype) for key, value in model.state_dict().items()})
    return Converted(model.eval(), name, arguments, in_chans, classes, convolutions.leftover)


def _layout(state: StateReader) -> _Layout:
    if "lift.conv.weights" in state:
        return _Layout(False, [("lift.conv", "lift.bn")], ["blocks"], [], "bn")
    if "stem.net.0.weights" in state:
        layers, stages = state.count("stem.net.*.weights"), max(1, state.count("stages.*."))
        return _Layout(
            windowed=True,
            stem=[(f"stem.net.{3 * i}", f"stem.net.{3 * i + 1}") for i in range(layers)],
            blocks=[f"stages.{i}.blocks" for i in range(stages)],
            between=[(f"stages.{i}.downsample.conv", f"stages.{i}.downsample.bn") for i in range(stages - 1)],
            head_norm="bn1",
        )
    raise ConversionError(
        "not a model of the released code: it has neither the key lift.conv.weights (flat) nor stem.net.0.weights (windowed)"
    )


def _heads(given: int | Sequence[int] | None, dims: list[int], *, windowed: bool) -> int | list[int]:
    if given is None:
        if not windowed or tuple(dims) not in _HEADS:
            raise ConversionError(
                f"the heads of a model of {', '.join(map(str, dims))} fields are not in its state dict: give --num-heads"
                + ("" if windowed else " (the released code names its files DATASET_GROUP_DEPTH_FIELDS_HEADS_EPOCH)")
            )
        return list(_HEADS[tuple(dims)])
    heads = [given] if isinstance(given, int) else list(given)
    if len(heads) != len(dims):
        raise ConversionError(f"heads of {len(heads)} stages were given, the model has {len(dims)}: give --num-heads for each")
    return heads if windowed else heads[0]


def _stem(state: StateReader, layout: _Layout, convolutions: Convolutions, size: int, dim: int) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    fields = _image_channels(state, layout)
    for i, (conv, norm) in enumerate(layout.stem):
        before, fields = fields, dim if i == len(layout.stem) - 1 else max(1, dim // 2)
        weight = convolutions.take(conv, fields, before, size if i == 0 else 3, lifting=i == 0)
        weights[f"stem.{3 * i}.conv.filters.weight"] = weight
        weights |= _norm(state, norm, f"stem.{3 * i + 1}", fields)
    return weights


def _image_channels(state: StateReader, layout: _Layout) -> int:
    """How many channels the lifting layer takes: its coefficients over those of one channel."""
    (conv, norm), key = layout.stem[0], state.functions_key(layout.stem[0][0])
    if key is None:
        return state.peek(f"{conv}.filter").shape[1]
    return max(1, state.peek(f"{conv}.weights").numel() // (state.fields_of(norm) * len(state.peek(key))))


def _block(
    state: StateReader, convolutions: Convolutions, theirs: str, ours: str, dim: int, ratio: int, kernel_size: int
) -> dict[str, Tensor]:
    fields = {"mlp.fc1": (ratio * dim, dim), "mlp.fc2": (dim, ratio * dim)}  # out, in
    weights: dict[str, Tensor] = {}
    for name, layers in _CONVS.items():
        size = kernel_size if name == "attn.qkv.mix" else 1
        taken = [convolutions.take(f"{theirs}.{layer}", *fields.get(name, (dim, dim)), size) for layer in layers]
        weights[f"{ours}.{name}.filters.weight"] = torch.cat(taken)
    for name, norm in _NORMS.items():
        weights |= _norm(state, f"{theirs}.{norm}", f"{ours}.{name}", ratio * dim if name == "mlp.norm1" else dim)
    for name, scale in _SCALES.items():
        weights[f"{ours}.{name}"] = state.take(f"{theirs}.{scale}", 1)
    return weights


def _norm(state: StateReader, theirs: str, ours: str, fields: int) -> dict[str, Tensor]:
    """escnn keeps one ordinary batch norm inside its own, and where the fields of that size are."""
    state.drop(f"{theirs}.indices_{state.group_order}")
    return _statistics(state, state.norm_key(theirs, ""), ours, fields)


def _statistics(state: StateReader, theirs: str, ours: str, size: int) -> dict[str, Tensor]:
    """A batch norm; how many batches it has seen says nothing in eval mode, and old checkpoints leave it out."""
    weights = {f"{ours}.{name}": state.take(f"{theirs}{name}", size) for name in _STATISTICS}
    count = state.take_if_there(f"{theirs}num_batches_tracked")
    weights[f"{ours}.num_batches_tracked"] = torch.zeros((), dtype=torch.long) if count is None else count
    return weights


def _head(state: StateReader, norm: str, dim: int, num_classes: int | None) -> dict[str, Tensor]:
    order, hidden, outputs = state.group_order, state.length("head.fc1.bias"), state.length("head.fc2.bias")
    state.drop(f"head.pool.in_indices_{order}", f"head.pool.out_indices_{order}")
    kept = outputs if num_classes is None else num_classes
    if not 2 <= kept <= outputs:
        raise ConversionError(f"its classifier has {outputs} outputs, {kept} of them cannot be kept")
    weights = {
        "head.hidden.0.weight": state.take("head.fc1.weight", hidden, dim),
        "head.hidden.0.bias": state.take("head.fc1.bias", hidden),
        "head.fc.weight": state.take("head.fc2.weight", outputs, hidden)[:kept],
        "head.fc.bias": state.take("head.fc2.bias", outputs)[:kept],
    }
    return weights | _statistics(state, f"head.{norm}.", "head.hidden.1", hidden)
