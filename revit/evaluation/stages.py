"""What can be compared on the way from an image to an answer: the stages of a model, ours or not, and how each may turn.

A model with `named_features` says what its stages are. Of any other module every submodule that returns a tensor is one, in the
order of the calls. How a map turns is read off its shape where the shape says it; where two readings are possible, both are
tried, because each is a true action of the group: whoever turns with the input under one of them is equivariant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from revit.groups import Group

OUTPUT = "logits"
"""The name of the last stage, the output of the model."""


def read_stages(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The stages of a model for images [B, C, H, W], in the order in which they are computed; the last is `logits` [B, K],
    or [B, K, h, w] of a model that answers for each pixel.

    Tokens [B, N, C] become maps [B, C, h, w] where N (or N - 1, with a class token in front) is a grid in the proportions of
    the image. What is no floating-point tensor of B samples is left out.
    """
    if hasattr(model, "named_features"):
        found: dict[str, Any] = model.named_features(x)  # type: ignore[operator]
        latest = {id(value): name for name, value in found.items()}  # one tensor of two names keeps the later: pre_class
        found = {name: value for name, value in found.items() if latest[id(value)] == name}
    else:
        with _watching(model) as found:
            output = model(x)
        for name in [name for name, value in found.items() if value is output]:
            del found[name]
        found[OUTPUT] = output
    check_logits(found.get(OUTPUT), len(x))
    stages = {name: _as_map(value, x) for name, value in found.items()}
    return {name: value for name, value in stages.items() if value is not None}


def kinds_of(value: Tensor, group: Group) -> tuple[str, ...]:
    """The ways in which a stage can turn under a group, as `revit.equivariance.transform` calls them; none if it cannot."""
    if value.ndim <= 2:
        return ("invariant",)
    if value.ndim == 5:
        return ("features",) if value.shape[2] == group.order else ()
    if value.ndim == 4:
        stacked = group.order > 1 and value.shape[1] % group.order == 0
        return ("image", "stacked") if stacked else ("image",)
    return ()


def check_logits(logits: Any, samples: int) -> None:
    """Refuses what is no answer for each image, [B, K], nor for each of its pixels, [B, K, h, w]."""
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 4) or len(logits) != samples:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"expected a model that returns logits [B, classes] or [B, classes, H, W] for {samples} images, got shape {shape}"
        )


def answer_kind(logits: Tensor) -> str:
    """How answers turn: a class of an image stays, a map of classes turns with the image."""
    return "image" if logits.ndim == 4 else "invariant"


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Collects the outputs of all submodules while they run. Compiled modules (TorchScript) cannot be watched: nothing then."""
    found: dict[str, Any] = {}
    seen: list[int] = []

    def keep(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and id(output) not in seen:  # a container returns what its last part returned
            calls = sum(key.split("#")[0] == name for key in found)
            found[f"{name}#{calls + 1}" if calls else name] = output
            seen.append(id(output))

    handles = []
    if not isinstance(model, torch.jit.ScriptModule):
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_hook(lambda _m, _x, output, name=name: keep(name, output)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _as_map(value: Any, x: Tensor) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 1 or len(value) != len(x):
        return None
    if value.ndim != 3:
        return value
    for tokens in (value, value[:, 1:]):
        height = math.isqrt(tokens.shape[1] * x.shape[-2] // x.shape[-1])
        if height > 0 and tokens.shape[1] % height == 0 and tokens.shape[1] * x.shape[-2] == height * height * x.shape[-1]:
            return tokens.transpose(1, 2).unflatten(2, (height, -1))  # [B, C, h, w]
    return None
