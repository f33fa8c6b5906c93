r"""Attentive group convolutions (Romero et al. 2020): convolutions that weigh what they are about to sum.

A group convolution sums the responses of single input fields i and elements h, `y[o,g,i,h] = x[i,h] * T_g W[o,i,g^-1 h]`. The
attentive one first scales each of them down, by an attention to fields `c` and an attention to positions p, `a`:

    out[o,g](p) = sum_{i,h} (1 - a[o,g,h](p) c[o,g,i,h]) y[o,g,i,h](p)                               (`AttentiveConv`)

    c[o,g,.,h] = sigmoid(sum_s W2[o,g^-1 h] relu(W1[o,g^-1 h] s)),    s = mean and maximum of y[o,g,.,h] over p
    a[o,g,h]   = sigmoid(sum_s s * T_g V[o,s,g^-1 h]),                s = mean and maximum of c y over i

Every output field o has weights W1, W2, V of its own. `FeatureAttentiveConv` takes c and a to be the same for all outputs:
they are then attention to the input, `out = conv((1 - a c) x)`, by group-linear maps and a group convolution. Attention turns
with the input, since its weights depend on g and h through `g^-1 h` alone and its filters are turned by g.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revit.exactness import Sampling
from revit.groups import Group
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv, check_features
from revit.nn.filter_bank import TurnedFilters

RESPONSES_AT_ONCE = 2**22
"""How many numbers of `y` an `AttentiveConv` holds at a time (in one output field at least)."""


class _Maximum(torch.autograd.Function):
    """`amax` with its gradient, shared by equal maxima, from fewer passes over the memory: five times faster backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: tuple[int, ...]) -> Tensor:
        out = x.amax(dim, keepdim=True)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, out = ctx.saved_tensors
        mask = torch.eq(x, out, out=torch.empty_like(x))
        return mask.mul_(gradient / mask.sum(ctx.dim, keepdim=True)), None


def maximum(x: Tensor, *dim: int) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x.amax(dim)
    return _Maximum.apply(x, dim).squeeze(dim)


def attentive_fields(x: Tensor, filters: Tensor, reduce: Tensor, expand: Tensor, spatial: Tensor, sampling: Sampling) -> Tensor:
    """The attentive convolution of maps [B, I*E, H, W] to O fields [B, O, G, H', W'].

    E is the number of elements of the input: G, or 1 for an image. The weights are banks, turned and permuted for each g:
    filters [O, G, I, E, K, K], reduce [O, C, G, I, E] to C hidden numbers, expand [O, I, G, C, E], spatial [O, G, 2, E, S, S].
    """
    out_fields, order, in_fields, elements = filters.shape[:4]
    pairs = elements * out_fields * order  # (h, o, g)
    weight = filters.permute(2, 3, 0, 1, 4, 5).flatten(0, 3).unsqueeze(1)  # [I*E*O*G, 1, K, K]
    y = F.conv2d(x, weight, None, sampling.stride, sampling.padding, sampling.dilation, groups=in_fields * elements)
    y = y.unflatten(1, (in_fields, pairs))  # [B, I, E*O*G, H', W']

    seen = torch.cat((y.mean(dim=(-2, -1)), maximum(y, -2, -1))).transpose(1, 2)  # [2B, E*O*G, I]
    hidden = _per_pair(seen, reduce.permute(4, 0, 2, 1, 3).flatten(0, 2)).relu()  # [2B, E*O*G, C]
    of_both = _per_pair(hidden, expand.permute(4, 0, 2, 1, 3).flatten(0, 2)).unflatten(0, (2, x.shape[0])).sum(dim=0)
    to_fields = of_both.sigmoid().transpose(1, 2)[..., None, None]  # c, [B, I, E*O*G, 1, 1]

    attended = to_fields * y
    total = attended.sum(dim=1)  # [B, E*O*G, H', W']
    seen = torch.stack((total / in_fields, maximum(attended, 1)), dim=2).flatten(1, 2)  # [B, E*O*G*2, H', W']
    weight = spatial.permute(3, 0, 1, 2, 4, 5).flatten(0, 3).unsqueeze(1)  # [E*O*G*2, 1, S, S]
    # One filter for each map, then the sum of two, is several times faster than groups of two maps, and faster in this format.
    seen = seen.contiguous(memory_format=torch.channels_last)
    looks = F.conv2d(seen, weight, padding=spatial.shape[-1] // 2, groups=2 * pairs)
    to_positions = looks.unflatten(1, (pairs, 2)).sum(dim=2).sigmoid()  # a, [B, E*O*G, H', W']
    out = y.sum(dim=1) - to_positions * total
    return out.unflatten(1, (elements, out_fields, order)).sum(dim=1)  # [B, O, G, H', W']


def _per_pair(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix for each pair: [B, P, I] and [P, O, I] -> [B, P, O]. The batch takes the place of pixels: that is faster."""
    pixels = x.permute(1, 2, 0).reshape(1, -1, x.shape[0], 1)  # [1, P*I, B, 1]
    out = F.conv2d(pixels, weight.flatten(0, 1)[..., None, None], groups=len(weight))
    return out.view(*weight.shape[:2], x.shape[0]).permute(2, 0, 1)


class AttentiveConv(nn.Module):
    r"""A lifting or group convolution with attention inside, for every output field on its own; the same map otherwise.

    `conv` gives the filters and the sizes; `hidden` is the width between W1 and W2, `kernel_size` (odd) that of V. The
    responses of each output field are |G| times as many as the input, [B, I, G, G, H', W']. So a few output fields are done at
    a time, and in training their responses are not kept but computed again in the backward pass.
    """

    def __init__(self, conv: LiftingConv | GroupConv, *, hidden: int, kernel_size: int = 7, filters: str = "auto") -> None:
        super().__init__()
        if isinstance(conv, GroupConv) and conv.groups > 1:
            raise ValueError(f"attention needs a convolution of all input fields, got groups={conv.groups}")
        self.conv, self.hidden, self.kernel_size = conv, check_hidden(hidden), check_odd(kernel_size)
        self.in_channels, self.out_channels = conv.in_channels, conv.out_channels
        self.lifting = isinstance(conv, LiftingConv)
        self.elements = 1 if self.lifting else conv.group.order  # of the input
        turned = partial(TurnedFilters, conv.group, lifting=self.lifting)
        self.reduce = turned(conv.out_channels * hidden, conv.in_channels, 1, filters="free")
        self.expand = turned(conv.out_channels * conv.in_channels, hidden, 1, filters="free")
        self.spatial = turned(conv.out_channels, 2, kernel_size, filters=filters)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the convolution cannot be exact (or warns, if it is not strict)."""
        return self.conv.output_size(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image: the convolution, two maps of two statistics, two filters."""
        fields = self.conv.group.order * self.elements * self.out_channels * self.in_channels
        filters = self.conv.sampling.kernel_size**2 * self.in_channels + 2 * self.kernel_size**2
        return 4 * fields * self.hidden + fields // self.in_channels * filters * height * width

    @property
    def weight(self) -> nn.Parameter:
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        maps = self._maps(x)
        height, width = self.output_size(*x.shape[-2:])
        order, fields_in, fields_out = self.conv.group.order, self.in_channels, self.out_channels
        banks = (
            self.conv.filters().unflatten(1, (fields_in, self.elements)).unflatten(0, (fields_out, order)),
            self.reduce().view(fields_out, self.hidden, order, fields_in, self.elements),
            self.expand().view(fields_out, fields_in, order, self.hidden, self.elements),
            self.spatial().unflatten(1, (2, self.elements)).unflatten(0, (fields_out, order)),
        )
        a_field = len(x) * fields_in * self.elements * order * height * width
        at_once = max(1, RESPONSES_AT_ONCE // a_field)
        parts = zip(*(bank.split(at_once) for bank in banks), strict=True)
        run = partial(attentive_fields, sampling=self.conv.sampling)
        if at_once < fields_out and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        out = torch.cat([run(maps, *part) for part in parts], dim=1)  # [B, C_out, G, H', W']
        return out if self.conv.bias is None else out + self.conv.bias.view(-1, 1, 1, 1)

    def _maps(self, x: Tensor) -> Tensor:
        if not self.lifting:
            check_features(x, self.in_channels, self.conv.group)
            return x.flatten(1, 2)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"expected images [B, {self.in_channels}, H, W], got shape {list(x.shape)}")
        return x

    def extra_repr(self) -> str:
        return f"{self.hidden} hidden, attention to {self.kernel_size} x {self.kernel_size} positions"


class ChannelAttention(nn.Module):
    """Attention to fields, [B, C, G, H, W] -> [B, C, G, 1, 1] in (0, 1): `sigmoid(sum_s W2 relu(W1 s))` with s the mean and the
    maximum over positions, W1 and W2 group-linear maps with `hidden` fields between them."""

    def __init__(self, group: Group | str, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = GroupLinear(group, channels, check_hidden(hidden), bias=False)
        self.fc2 = GroupLinear(group, hidden, channels, bias=False)
        with torch.no_grad():  # weights that sum to 1: of features after a ReLU, all positive, no hidden field starts dead
            weight = self.fc1.weight
            weight.add_((1 - weight.sum(dim=(1, 2, 3, 4), keepdim=True)) / weight[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat((x.mean(dim=(-2, -1), keepdim=True), x.amax(dim=(-2, -1), keepdim=True)))  # [2B, C, G, 1, 1]
        return self.fc2(self.fc1(seen).relu()).unflatten(0, (2, x.shape[0])).sum(dim=0).sigmoid()


class SpatialAttention(nn.Module):
    """Attention to positions, [B, C, G, H, W] -> [B, 1, G, H, W] in (0, 1): a group convolution of the mean and the maximum
    over fields, then the sigmoid. To those of an image (`lifting`), [B, C, H, W] -> [B, 1, H, W]: the maximum over elements."""

    def __init__(
        self, group: Group | str, kernel_size: int = 7, *, dilation: int = 1, filters: str = "auto", lifting: bool = False
    ) -> None:
        super().__init__()
        self.lifting, padding = lifting, dilation * (check_odd(kernel_size) // 2)
        convolution = LiftingConv if lifting else GroupConv
        self.conv = convolution(group, 2, 1, kernel_size, padding=padding, dilation=dilation, bias=False, filters=filters)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(torch.cat((x.mean(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)), dim=1))
        return (out.amax(dim=2) if self.lifting else out).sigmoid()


class FeatureAttentiveConv(nn.Module):
    """A convolution of its attended input, `conv((1 - a c) x)`: c of `ChannelAttention`, a of `SpatialAttention` to `c x`."""

    def __init__(
        self, conv: LiftingConv | GroupConv | GroupLinear, *, hidden: int, kernel_size: int = 7, dilation: int = 1,
        filters: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv, self.in_channels, self.out_channels = conv, conv.in_channels, conv.out_channels
        self.lifting = isinstance(conv, LiftingConv)
        self.channel = ChannelAttention("z2" if self.lifting else conv.group, conv.in_channels, hidden)
        self.spatial = SpatialAttention(conv.group, kernel_size, dilation=dilation, filters=filters, lifting=self.lifting)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output map; raises where the convolution cannot be exact (or warns, if it is not strict)."""
        return (height, width) if isinstance(self.conv, GroupLinear) else self.conv.output_size(height, width)

    @property
    def weight(self) -> nn.Parameter:
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        attended = x * (self.channel(x.unsqueeze(2)).squeeze(2) if self.lifting else self.channel(x))
        return self.conv(x - attended * self.spatial(attended))


def check_hidden(hidden: int) -> int:
    if not isinstance(hidden, int) or hidden < 1:
        raise ValueError(f"hidden must be a whole number >= 1, got {hidden!r}")
    return hidden


def check_odd(kernel_size: int) -> int:
    if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"the kernel of an attention to positions must be odd to keep the size, got {kernel_size!r}")
    return kernel_size
