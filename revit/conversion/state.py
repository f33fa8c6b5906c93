"""A state dict of others, taken tensor by tensor: what is missing, too much or of another shape is named."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before every name."""
_FUNCTIONS = re.compile(r"(?P<layer>.*)\._basisexpansion\.block_expansion_[^.]*\.sampled_basis")
_FIELD_SIZE = re.compile(r".*\.batch_norm_\[(?P<size>[0-9]{1,6})\]\.weight")


class ConversionError(ValueError):
    """A checkpoint that cannot be converted. The message names the part and says what is wrong with it."""


class StateReader:
    """Hands out the tensors of an escnn model by name and shape, each once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)
        for wrapper in _WRAPPERS:
            if self._left and all(key.startswith(wrapper) for key in self._left):
                self._left = {key.removeprefix(wrapper): tensor for key, tensor in self._left.items()}
        matches = [_FUNCTIONS.fullmatch(key) for key in self._left]
        self._functions = {match["layer"]: match[0] for match in matches if match}
        self.group_order = self._find_order()

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def count(self, pattern: str) -> int:
        """How many different numbers stand where the pattern has `*`, such as `blocks.*.`."""
        before, after = map(re.escape, pattern.split("*"))
        matches = (re.match(f"{before}([0-9]+){after}", key) for key in self._left)
        return len({match[1] for match in matches if match})

    def take(self, key: str, *shape: int) -> Tensor:
        """The tensor of this name and shape; -1 stands for any size."""
        if key not in self._left:
            raise ConversionError(f"the key {shown(key)} is missing")
        tensor = self._left.pop(key)
        if tensor.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
            wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
            raise ConversionError(f"{shown(key)} has shape {list(tensor.shape)}, expected [{wanted}]")
        if not tensor.is_floating_point() and not key.endswith("num_batches_tracked"):
            raise ConversionError(f"{shown(key)} holds {tensor.dtype}, expected floating-point numbers")
        if not torch.isfinite(tensor).all():
            raise ConversionError(f"{shown(key)} holds NaN or infinite values")
        return tensor

    def take_if_there(self, key: str, *shape: int) -> Tensor | None:
        return self.take(key, *shape) if key in self else None

    def peek(self, key: str, or_else: str | None = None) -> Tensor:
        """The tensor of this name, which stays to be taken."""
        if key not in self._left:
            raise ConversionError(or_else or f"the key {shown(key)} is missing")
        return self._left[key]

    def fields_of(self, norm: str) -> int:
        """How many fields a norm has."""
        return self.length(self.norm_key(norm, "weight"))

    def length(self, key: str) -> int:
        """Of a vector that stays to be taken."""
        vector = self.peek(key)
        if vector.ndim != 1 or not len(vector):
            raise ConversionError(f"{shown(key)} has shape {list(vector.shape)}, expected [any]")
        return len(vector)

    def norm_key(self, norm: str, name: str) -> str:
        return f"{norm}.batch_norm_[{self.group_order}].{name}"

    def functions_key(self, layer: str) -> str | None:
        """Where the sampled functions of a convolution are, if they were saved."""
        return self._functions.get(layer)

    def drop(self, *keys: str) -> None:
        """Bookkeeping of escnn that says nothing about the weights, if it is there."""
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        """Nothing may be left: an unknown tensor is a part of the model that would be lost."""
        if self._left:
            names = ", ".join(shown(key) for key in list(self._left)[:3])
            raise ConversionError(f"{len(self._left)} unknown keys: {names}" + (", ..." if len(self._left) > 3 else ""))

    def _find_order(self) -> int:
        """Number of elements of the group: escnn names its norms by the size of a field."""
        matches = (_FIELD_SIZE.fullmatch(key) for key in self._left)
        sizes = sorted({int(match["size"]) for match in matches if match})
        if len(sizes) != 1:
            found = f"fields of {', '.join(map(str, sizes[:5]))} elements" if sizes else "no norm of escnn"
            raise ConversionError(f"not a model of the released code: it has {found}")
        return sizes[0]


def shown(key: str) -> str:
    """A key as part of one printable line."""
    text = key if key.isprintable() else ascii(key)
    return text if len(text) <= 150 else f"{text[:150]}..."
