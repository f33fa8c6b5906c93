"""Group convolutions of each field by a filter of its own, in shapes that a CPU is fast at.

As a convolution of C groups of |G| channels they are slow wherever |G| is not a multiple of eight, the numbers that go through
an instruction together: the library falls back to other code, for p6 three times and for z2m five times as slow
(`benchmarks/shapes.py`). So elements are filled up with zeros to 1, 2, 4, 8 or 16, and then fields go side by side, with zeros
between them, until they are eight channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from revit.exactness import Sampling
from revit.nn.matrix_products import is_eager_on_cpu

CHANNELS = 8
"""That go through an instruction together."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether `convolve` is faster than the plain convolution of x [B, C, G, H, W]: where elements are filled up, and where
    fields go side by side, but forward passes alone gain nothing from that at one and four elements."""
    order = x.shape[2]
    if x.dtype != torch.float32 or not is_eager_on_cpu(x):
        return False
    training = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    return width(order) != order or order == 2 or (order < CHANNELS and training)


def width(order: int) -> int:
    """The elements of a field with those that are filled up."""
    return 1 << (order - 1).bit_length() if order <= 2 * CHANNELS else -(-order // CHANNELS) * CHANNELS


def convolve(x: Tensor, bank: Tensor, sampling: Sampling) -> Tensor:
    """`F.conv2d(x, bank, groups=C)` for x [B, C, G, H, W] and a bank [C*G, G, K, K] -> [B, C, G, H', W']."""
    fields, order = x.shape[1], x.shape[2]
    wide = width(order)
    together = max(1, CHANNELS // wide)
    groups = -(-fields // together)
    more_fields, more_elements = groups * together - fields, wide - order
    if more_fields or more_elements:
        x = F.pad(x, (0, 0, 0, 0, 0, more_elements, 0, more_fields))
        filters = bank.unflatten(0, (fields, order))  # [C, G, G, K, K]
        bank = F.pad(filters, (0, 0, 0, 0, 0, more_elements, 0, more_elements, 0, more_fields)).flatten(0, 1)
    if together > 1:
        filters = bank.unflatten(0, (groups, together, wide)).unsqueeze(3)  # [groups, fields, G, 1, G, K, K]
        apart = torch.eye(together, dtype=bank.dtype, device=bank.device).view(together, 1, together, 1, 1, 1)
        bank = (filters * apart).flatten(3, 4).flatten(0, 2)  # [C*G, fields*G, K, K]
    out = F.conv2d(x.flatten(1, 2), bank, None, sampling.stride, sampling.padding, sampling.dilation, groups)
    return out.unflatten(1, (-1, wide))[:, :fields, :order].contiguous()
