r"""Pooling over the group and over space, and down-sampling that is exact at every size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.exactness import Sampling, next_multiple
from revit.groups import Group
from revit.nn.convolution import GroupConv, LiftingConv

POOLS = ("max", "mean")
BLUR = (1 / 8, 3 / 8, 3 / 8, 1 / 8)


class GroupPool(nn.Module):
    """Forgets the element: [B, C, G, H, W] -> [B, C, H, W] by `max` (exact to the bit) or `mean` over G."""

    def __init__(self, mode: str = "max") -> None:
        super().__init__()
        if mode not in POOLS:
            raise ValueError(f"unknown group pooling {mode!r}; choose {', '.join(POOLS)}")
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5:
            raise ValueError(f"expected features [B, C, G, H, W], got shape {list(x.shape)}")
        return x.amax(dim=2) if self.mode == "max" else x.mean(dim=2)

    def extra_repr(self) -> str:
        return self.mode


class SpatialPool(nn.Module):
    """Mean over positions: [..., H, W] -> [...]. After `GroupPool` the result is invariant."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(-2, -1))


def fit_to_stride(x: Tensor, stride: int) -> Tensor:
    """Grows the sides of [..., H, W] to the next multiple of `stride` by averaging neighbours, symmetrically.

    A strided layer whose kernel is twice its stride is exact where the stride divides the size. Adaptive pooling has
    bins that are symmetric at every size, so any other size is first brought there without breaking the symmetry.
    """
    height, width = x.shape[-2:]
    size = next_multiple(height, stride), next_multiple(width, stride)
    if size == (height, width):
        return x
    return F.adaptive_avg_pool2d(x.flatten(0, -4) if x.ndim > 4 else x, size).view(*x.shape[:-2], *size)


BLUR_SAMPLING = Sampling(4, stride=2, padding=1)


def blur_pool(x: Tensor) -> Tensor:
    """Halves the sides of [B, C, G, H, W] by means of 4 x 4 pixels with the weights 1, 3, 3, 1, after `fit_to_stride`."""
    weights = x.new_tensor(BLUR)
    kernel = torch.outer(weights, weights).expand(x.shape[1] * x.shape[2], 1, -1, -1)
    maps = fit_to_stride(x, BLUR_SAMPLING.stride).flatten(1, 2)
    out = F.conv2d(maps, kernel, None, BLUR_SAMPLING.stride, BLUR_SAMPLING.padding, groups=len(kernel))
    return out.unflatten(1, x.shape[1:3])


class BlurPool(nn.Module):
    """`blur_pool`: [B, C, G, H, W] -> [B, C, G, ceil(H/2), ceil(W/2)], exact at every size.

    What is finer than the new pixels is blurred away instead of being mistaken for something coarser, which depends on the
    angle of the image: so turns by less than 90 degrees come out better.
    """

    def __init__(self, group: Group | str, channels: int) -> None:
        super().__init__()
        self.group, self.channels = Group.parse(group), channels

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return halved(height, width)

    def multiply_adds(self, height: int, width: int) -> int:
        """Products for an output map of this size, of one image: |G| C 4^2 H' W'."""
        return self.channels * self.group.order * BLUR_SAMPLING.kernel_size**2 * height * width

    def forward(self, x: Tensor) -> Tensor:
        return blur_pool(x)

    def extra_repr(self) -> str:
        return f"{self.group}, {self.channels} fields, {BLUR_SAMPLING}"


class LiftingLayer(nn.Module):
    """Lifts an image onto the group and shrinks it by `stride`.

    `odd=False` (exact at every size): kernel 2*stride, padding stride/2, after `fit_to_stride`; kernel 3 for stride 1.
    `odd=True` (the released code): kernel 2*stride + 1, padding stride, exact only where the stride rule holds.
    `smooth=True`: kernel 5 at every pixel; `halvings` is how many `BlurPool` are to follow the norm and its activation.
    """

    def __init__(
        self, group: Group | str, in_channels: int, out_channels: int, *, stride: int, odd: bool, filters: str, strict: bool,
        smooth: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.halvings = stride.bit_length() - 1 if smooth else 0
        if smooth and stride != 2**self.halvings:
            raise ValueError(f"a smooth stride is 1, 2, 4, ..., got {stride}")
        kernel_size, padding, self.fit = (5, 2, 1) if smooth else strided_kernel(stride, odd=odd, odd_kernel=2 * stride + 1)
        self.conv = LiftingConv(
            group, in_channels, out_channels, kernel_size,
            stride=1 if smooth else stride, padding=padding, bias=False, filters=filters, strict=strict,
        )  # fmt: skip

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.conv.output_size(next_multiple(height, self.fit), next_multiple(width, self.fit))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(fit_to_stride(x, self.fit))


class Downsample(nn.Module):
    """Halves a feature map and changes its fields: [B, C_in, G, H, W] -> [B, C_out, G, ceil(H/2), ceil(W/2)].

    `odd=False` (exact at every size): kernel 4, padding 1, after `fit_to_stride`. `odd=True` (the released code): kernel 3,
    padding 1, exact for odd sizes only. `smooth=True`: `BlurPool`, then kernel 3 at every pixel, exact at every size.
    """

    def __init__(
        self, group: Group | str, in_channels: int, out_channels: int, *, odd: bool = False, smooth: bool = False,
        filters: str = "auto", strict: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.smooth, stride = smooth, 1 if smooth else 2
        kernel_size, padding, self.fit = strided_kernel(stride, odd=odd, odd_kernel=3)
        self.conv = GroupConv(
            group, in_channels, out_channels, kernel_size,
            stride=stride, padding=padding, bias=False, filters=filters, strict=strict,
        )  # fmt: skip

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        if self.smooth:
            height, width = halved(height, width)
        return self.conv.output_size(next_multiple(height, self.fit), next_multiple(width, self.fit))

    def multiply_adds(self, height: int, width: int) -> int:
        """Products of the blur for an output map of this size, of one image; those of the convolution are its own."""
        blurred = self.conv.in_channels * self.conv.group.order * BLUR_SAMPLING.kernel_size**2 * height * width
        return blurred if self.smooth else 0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(blur_pool(x) if self.smooth else fit_to_stride(x, self.fit))


def halved(height: int, width: int) -> tuple[int, int]:
    return -(-height // 2), -(-width // 2)


def strided_kernel(stride: int, *, odd: bool, odd_kernel: int) -> tuple[int, int, int]:
    """Kernel size, padding and the multiple to which sizes are first fitted, for a layer that shrinks by `stride`."""
    if not isinstance(stride, int) or stride < 1:
        raise ValueError(f"stride must be a whole number >= 1, got {stride!r}")
    if odd or stride == 1:
        kernel_size = odd_kernel if odd else 3
        return kernel_size, kernel_size // 2, 1
    if stride % 2:
        raise ValueError(f"an exact stride is 1 or even, got {stride}; nearest: {stride - 1} and {stride + 1}")
    return 2 * stride, stride // 2, stride
