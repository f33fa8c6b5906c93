r"""When a layer samples the plane symmetrically: the integer arithmetic of exact equivariance.

A strided layer keeps the symmetry of the grid if and only if its sampling points lie symmetrically about the centre
of the image: `(H + 2p - d(k - 1) - 1) mod s == 0` on each axis that the group moves. Windows must tile the image
symmetrically. Everything here is pure integer arithmetic, so it can be asked before anything is computed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from revit.groups import Group


class EquivarianceError(ValueError):
    """The layer cannot be equivariant at this size; the message names the sizes that work."""


def moved_axes(group: Group) -> tuple[str, ...]:
    """The image axes that a group moves: none for z2, the width for z2m (a left-right mirror), both otherwise."""
    if group.rotations > 1:
        return ("height", "width")
    return ("width",) if group.reflections else ()


@dataclass(frozen=True)
class Sampling:
    """Where a convolution or pooling looks along one axis: kernel size, stride, padding (both sides), dilation."""

    kernel_size: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")

    @property
    def extent(self) -> int:
        """How many pixels the kernel covers."""
        return self.dilation * (self.kernel_size - 1) + 1

    def leftover(self, size: int) -> int:
        """Pixels at the far end that no kernel position reaches; 0 if and only if the layer is symmetric."""
        return (size + 2 * self.padding - self.extent) % self.stride

    def output_size(self, size: int) -> int:
        reach = size + 2 * self.padding - self.extent
        if size < 1 or reach < 0:
            least = max(1, self.extent - 2 * self.padding)
            raise ValueError(f"size {size} is below the minimum {least} of a layer with {self}")
        return reach // self.stride + 1

    def exact_sizes_near(self, size: int) -> list[int]:
        """The nearest sizes, one below and one above, at which the layer is symmetric."""
        least = max(1, self.extent - 2 * self.padding)
        below = next((s for s in range(size - 1, least - 1, -1) if self.leftover(s) == 0), None)
        above = next(s for s in range(max(size, least - 1) + 1, size + least + self.stride + 1) if self.leftover(s) == 0)
        return [above] if below is None else [below, above]

    def __str__(self) -> str:
        text = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return text if self.dilation == 1 else f"{text}, dilation={self.dilation}"


class Strictness:
    """What to do where a layer cannot be exact: raise `EquivarianceError`, or warn once and go on."""

    def __init__(self, strict: bool) -> None:
        self.strict, self._warned = strict, False

    def refuse(self, message: str) -> None:
        if self.strict:
            raise EquivarianceError(f"{message}; strict=False goes on with the error")
        if not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            warnings.warn(message, stacklevel=2)


class StrideGuard:
    """Checks at each call that a convolution samples symmetrically on the axes that its group moves."""

    def __init__(self, group: Group, sampling: Sampling, *, strict: bool) -> None:
        self.group, self.sampling, self.strictness = group, sampling, Strictness(strict)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        out = self.sampling.output_size(height), self.sampling.output_size(width)
        for axis, size in (("height", height), ("width", width)):
            if axis in moved_axes(self.group) and self.sampling.leftover(size):
                self.strictness.refuse(self._message(axis, size))
        return out

    def _message(self, axis: str, size: int) -> str:
        s = self.sampling
        nearest = " and ".join(map(str, s.exact_sizes_near(size)))
        message = (
            f"a layer with {s} is not {self.group} equivariant at {axis} {size}: "
            f"({size} + 2*{s.padding} - {s.dilation}*({s.kernel_size} - 1) - 1) % {s.stride} = {s.leftover(size)}, so its "
            f"sampling points are not symmetric; nearest exact sizes: {nearest}"
        )
        if s.stride % 2 == 0 and size % s.stride == 0:
            message += f"; at {size}, kernel_size={2 * s.stride}, padding={s.stride // 2} is exact"
        return message


def next_multiple(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class Tiling:
    """Windows along one axis: their side, and the pixels added (and masked) before and after the map."""

    side: int
    before: int
    after: int

    @property
    def padded(self) -> bool:
        return self.before + self.after > 0


def tile_axis(size: int, window: int, *, shifted: bool = False) -> Tiling:
    """Tiles an axis by windows, symmetrically if that is possible.

    Symmetric windows need the same padding on both sides, an even total. Where it is odd, one window more repairs odd
    windows; even windows on an odd axis cannot be repaired, and `before` and `after` then differ. `shifted` moves the
    borders by half a window, which must be even. A map no larger than a window is one window.
    """
    if window >= size and not shifted:
        return Tiling(size, 0, 0)
    total = next_multiple(size, window) - size + (window if shifted else 0)
    if total % 2 and window % 2:
        total += window
    before = window // 2 if shifted and total % 2 else total // 2
    return Tiling(window, before, -(size + before) % window)


class WindowGuard:
    """Checks at each call that windows tile a map symmetrically on the axes that its group moves."""

    def __init__(self, group: Group, window: int, *, shifted: bool, strict: bool) -> None:
        if shifted and window % 2:
            raise EquivarianceError(
                f"windows of {window} cannot be shifted by half a window; "
                f"exact shifted windows are even: {window - 1} or {window + 1}"
            )
        self.group, self.window, self.shifted, self.strictness = group, window, shifted, Strictness(strict)

    def tilings(self, height: int, width: int) -> tuple[Tiling, Tiling]:
        rows, columns = (tile_axis(size, self.window, shifted=self.shifted) for size in (height, width))
        for axis, size, tiling in (("height", height, rows), ("width", width, columns)):
            if axis in moved_axes(self.group) and tiling.before != tiling.after:
                self.strictness.refuse(
                    f"even windows of {self.window} cannot tile an odd {axis} {size} symmetrically, as {self.group} needs; "
                    f"nearest exact: {axis} {size - 1} or {size + 1}, or windows of {self.window - 1} or {self.window + 1}"
                )
        return rows, columns
