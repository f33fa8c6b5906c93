"""What a training step of any batch takes, from two steps of a few images: memory after every allocation, and operations.

The two steps are the real ones, forward and backward, except that products of matrices, convolutions and copies give zeros:
their size and type count here, not their values. All tensors that a step allocates are followed until they are freed. The same
things are allocated in the same order for any batch, so each point of a step takes `fixed + per_image * batch` bytes, and the
peak is the largest of these lines: one of a late stage may decide at a small batch, a steeper one of an early stage
at a large one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, shape_wrapper

from revit.evaluation.complexity import UNCOUNTED
from revit.evaluation.inference import place_of
from revit.evaluation.memory import loss_of_class_0

BATCHES = 2, 3
"""Images of the two steps. One image is not enough for batch norm."""

_aten = torch.ops.aten
_COSTLY = {
    operation.default
    for operation in (
        _aten.convolution, _aten.convolution_backward, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.clone,
        _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}  # fmt: skip
_FLOPS: dict[Any, Any] = {**flop_registry, **{operation: shape_wrapper(count) for operation, count in UNCOUNTED.items()}}


@dataclass(frozen=True)
class StepCost:
    """Bytes and multiply-adds of a training step as functions of the images in it, besides weights and the optimiser."""

    fixed: NDArray[np.float64]  # bytes after each allocation, of no image
    per_image: NDArray[np.float64]
    activations: tuple[float, float]  # bytes kept for the backward pass: fixed, per image
    macs: tuple[float, float]  # multiply-adds, forward and backward: fixed, per image

    def kept(self, batch: int) -> float:
        """Bytes of activations when the forward pass has ended."""
        return self.activations[0] + batch * self.activations[1]

    def peak(self, batch: int) -> float:
        """Most bytes at any time: activations, gradients, and what is being worked on."""
        return float((self.fixed + batch * self.per_image).max())

    def largest_batch(self, limit: float) -> int:
        """The most images whose step takes at most `limit` bytes."""
        if limit < self.fixed.max():
            return 0
        growing = self.per_image > 0
        return int(((limit - self.fixed[growing]) / self.per_image[growing]).min())


def step_cost(model: nn.Module, image_size: tuple[int, int], channels: int, *, bf16: bool = False) -> StepCost:
    """What a training step of the model (in training mode, with cross-entropy) costs, for any batch.

    With `bf16` it runs under torch's automatic mixed precision, by the rules for the CPU: those for GPUs are nearly the same.
    """
    (first, kept_first, macs_first), (second, kept_second, macs_second) = (
        _measured_step(model, (batch, channels, *image_size), bf16) for batch in BATCHES
    )
    if len(first) != len(second):  # the model computes otherwise for more images: only peaks and ends can be compared
        first, second = np.array([first.max(), kept_first]), np.array([second.max(), kept_second])
    per_image = (second - first) / (BATCHES[1] - BATCHES[0])
    return StepCost(
        fixed=first - BATCHES[0] * per_image,
        per_image=per_image,
        activations=_line(kept_first, kept_second),
        macs=_line(macs_first, macs_second),
    )


def _line(first: float, second: float) -> tuple[float, float]:
    slope = (second - first) / (BATCHES[1] - BATCHES[0])
    return first - BATCHES[0] * slope, slope


def _measured_step(model: nn.Module, shape: tuple[int, ...], bf16: bool) -> tuple[NDArray[np.float64], float, float]:
    """Bytes after each allocation of a step, bytes when its forward pass has ended, and multiply-adds."""
    device, dtype = place_of(model)
    images, labels = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape[0], device=device, dtype=torch.long)
    training = model.training
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    for parameter in model.parameters():
        parameter.grad = None
    model.train()
    try:
        with LiveTensors([*model.parameters(), *model.buffers(), images, labels]) as live:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = model(images)
                loss = F.cross_entropy(logits, labels) if logits.ndim == 2 else loss_of_class_0(logits)
            kept = live.bytes
            loss.backward()
        return np.array(live.history, dtype=np.float64), kept, live.macs
    finally:
        model.train(training)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)  # batch norm has seen zeros


class LiveTensors(TorchDispatchMode):
    """Follows the memory of all tensors that are made meanwhile, until they are freed; costly operations give zeros.

    `history` has the bytes after each allocation; tensors that were there before count nothing. `macs` are the multiply-adds
    of the products, as torch counts them.
    """

    def __init__(self, known: Iterable[Tensor], *, compute: bool = False) -> None:
        super().__init__()
        self.bytes, self.history, self.macs, self.compute = 0, list[int](), 0.0, compute
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {})) if self.compute or func not in _COSTLY else _zeros(func, args, kwargs or {})
        if func._overloadpacket in _FLOPS:
            self.macs += _FLOPS[func._overloadpacket](*args, **(kwargs or {}), out_val=result) / 2
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and size:
            self._sizes[key] = size
            self.bytes += size
            self.history.append(self.bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)


def _zeros(operation: Any, args: Any, kwargs: Any) -> Any:
    """What an operation would give, with zeros for its values."""
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    shapes = operation(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
    return tree_map_only(
        Tensor, lambda shape: torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device).zero_(), shapes
    )
