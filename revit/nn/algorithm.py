"""Which algorithm a group convolution takes: `dense` (one `conv2d` with the expanded bank) or `fourier` (`revit.nn.fourier`).

Both compute the same function. `auto` compares the seconds that both would take, from counts and rates measured on a CPU
(`python benchmarks/algorithms.py --fit`). They grow linearly with the number of positions, so what is left of the comparison
is one number for each layer: the positions from which on `fourier` is faster. It depends on nothing but the layer, so a model
takes the same algorithms in each run, at each batch size and on each machine. Elsewhere than on a CPU `auto` is `dense`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from revit.groups import Group
from revit.nn.fourier_basis import fourier_blocks, fourier_frames, multiply_adds

ALGORITHMS = ("auto", "dense", "fourier")
MARGIN = 1.6
"""How many times as fast as `dense` the prediction for `fourier` must be: of 195 layers drawn at random one was predicted to be
1.56 times as fast, and took 1.12 times as long."""
PIXEL_MARGIN = 2.0
"""The same for convolutions of one pixel, which take less than the rates say (`benchmarks/shapes.py`)."""

CHAIN = 1.2
"""And for two layers that stay in the basis between them, which gain more than the prediction for single layers says
(`benchmarks/chains.py`)."""

LARGE = 98_304
"""Numbers that a step of such layers must make of a sample: with fewer, threads wait for each other longer than they work."""

FEW = 36
"""Maps of fewer positions stay `dense`: their matrix products are too small for these rates to hold."""


class Rates(NamedTuple):
    """Seconds: of a call, of a product, and of a number that is written (`dense`: or read). For `fourier` also of a number
    that is read by a 1x1 convolution, of each number that the functions of filters make of the input, and of each product with
    these functions."""

    call: float
    product: float
    moved: float
    read: float = 0.0
    seen: float = 0.0
    seen_product: float = 0.0


class Pass(NamedTuple):
    """What both algorithms take in a forward pass, or in a forward and a backward pass, that at least so many samples share."""

    dense: Rates
    fourier: Rates
    samples: int


# What filters see is rated above the fit: layers of few fields take up to twice as long as predicted.
INFERENCE = Pass(Rates(4.0e-5, 9.0e-12, 4.3e-10), Rates(2.4e-4, 1.5e-11, 8.0e-10, 8.4e-10, 2.5e-9, 2.2e-11), samples=1)
TRAINING = Pass(Rates(3.7e-4, 3.1e-11, 1.3e-9), Rates(1.2e-3, 4.4e-11, 1.9e-9, 2.3e-9, 7.5e-9, 1.0e-10), samples=8)


class Work(NamedTuple):
    """A group convolution of I -> O fields with K x K filters that are made of Q functions."""

    group: Group
    in_fields: int
    out_fields: int
    kernel_size: int
    functions: int

    @property
    def dense_products(self) -> int:
        """For each position of the output: |G|^2 I O K^2."""
        return self.group.order**2 * self.in_fields * self.out_fields * self.kernel_size**2

    @property
    def block_products(self) -> int:
        """Of the fields with the blocks of the Fourier basis, for each position."""
        units = sum(blocks.units for blocks in fourier_blocks(self.group))
        return units * self.in_fields * self.functions * self.out_fields

    @property
    def read(self) -> int:
        """Numbers of the input that are mixed as they are, for each position: none if filters see it before."""
        return self.group.order * self.in_fields if self.kernel_size == 1 else 0

    @property
    def seen(self) -> int:
        """Numbers that the functions make of the input, for each position: none if the only function is the pixel itself."""
        return self.group.order * self.in_fields * self.functions if self.kernel_size > 1 else 0

    @property
    def seen_products(self) -> int:
        return self.seen * self.kernel_size**2

    @property
    def fourier_products(self) -> int:
        """All products in the Fourier basis, for each position."""
        return self.seen_products + multiply_adds(self.group, self.in_fields * self.functions, self.out_fields)

    def dense_seconds(self, rates: Rates) -> float:
        """For each position."""
        return self.dense_products * rates.product + self.group.order * (self.in_fields + self.out_fields) * rates.moved

    def fourier_seconds(self, rates: Rates) -> float:
        """For each position."""
        mixing = self.block_products * rates.product + self.group.order * self.out_fields * rates.moved
        return mixing + self.read * rates.read + self.seen * rates.seen + self.seen_products * rates.seen_product

    def fourier_from(self, rates: Pass) -> int | None:
        """The positions from which on `fourier` is faster, or None if it never is."""
        return fourier_from([self], rates, PIXEL_MARGIN if self.kernel_size == 1 else MARGIN)


def fourier_from(works: Sequence[Work], rates: Pass, margin: float) -> int | None:
    """The positions from which on `fourier` is `margin` times as fast for all of these together, or None."""
    gain = sum(work.dense_seconds(rates.dense) - margin * work.fourier_seconds(rates.fourier) for work in works)
    calls = len(works) * (margin * rates.fourier.call - rates.dense.call) / rates.samples
    return None if gain <= 0 else max(FEW, math.ceil(calls / gain))


class Algorithm:
    """The algorithm of a layer: fixed by name, or chosen for each size of the map."""

    def __init__(self, name: str, work: Work, filters: str, groups: int = 1) -> None:
        if name not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {name!r}; choose {', '.join(ALGORITHMS)}")
        self.name, self.work, self.filters, self.groups = name, work, filters, groups
        self.refusal = _why_not_fourier(work, filters, groups)
        if name == "fourier" and self.refusal is not None:
            raise ValueError(self.refusal)
        can = self.refusal is None
        self.in_training, self.in_inference = (work.fourier_from(rates) if can else None for rates in (TRAINING, INFERENCE))

    def renamed(self, name: str) -> Algorithm:
        """For the same layer."""
        return Algorithm(name, self.work, self.filters, self.groups)

    def is_fourier(self, positions: int, *, training: bool = False) -> bool:
        """Whether an output map of so many positions takes `fourier`."""
        least = self.in_training if training else self.in_inference
        return least is not None and positions >= least if self.name == "auto" else self.name == "fourier"

    def is_fourier_for(self, x: Tensor, weight: Tensor, positions: int) -> bool:
        """The same for an input: `auto` stays `dense` on other devices than a CPU, and in exported programs of any size."""
        any_size = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
        if self.name == "auto" and (any_size or not x.is_cpu):
            return False
        return self.is_fourier(positions, training=torch.is_grad_enabled() and weight.requires_grad)

    def products(self, positions: int) -> int | None:
        """Multiply-adds of `fourier` in inference, None where that takes `dense`."""
        return self.work.fourier_products * positions if self.is_fourier(positions) else None

    def __str__(self) -> str:
        if self.name != "auto":
            return self.name
        inference, training = (f"from {n}" if n else "nowhere" for n in (self.in_inference, self.in_training))
        if inference == training == "nowhere":
            return "dense (auto)"
        return f"fourier {inference} positions on, in training {training} on (auto)".replace("nowhere positions on", "nowhere")


class Chain:
    """Layers that are computed in one go in training, without leaving the Fourier basis: whether that pays.

    Layers without an algorithm to choose, those of `deploy()`, are run one by one.
    """

    def __init__(self, *layers: nn.Module) -> None:
        found = [getattr(layer, "algorithm", None) for layer in layers]
        self.algorithms = [algorithm for algorithm in found if isinstance(algorithm, Algorithm)]
        self.can = len(self.algorithms) == len(layers) and all(algorithm.refusal is None for algorithm in self.algorithms)
        self.least = self._least_positions() if self.can else None

    def _least_positions(self) -> int | None:
        works = [algorithm.work for algorithm in self.algorithms]
        least = fourier_from(works, TRAINING, CHAIN)
        width = max(work.group.order * max(work.in_fields * work.functions, work.out_fields) for work in works)
        return None if least is None else max(least, math.ceil(LARGE / width))

    def is_fourier_for(self, x: Tensor) -> bool:
        """For maps of the size of x. All layers take part: one that is fixed as `dense` is enough for the answer no."""
        names, positions = {algorithm.name for algorithm in self.algorithms}, x.shape[-2] * x.shape[-1]
        if "dense" in names or not self.can:
            return False
        return len(x) > 0 and x.is_cpu and (names == {"fourier"} or (self.least is not None and positions >= self.least))

    def __str__(self) -> str:
        return "layer by layer" if self.least is None else f"in one go from {self.least} positions on in training"


def _why_not_fourier(work: Work, filters: str, groups: int) -> str | None:
    if groups > 1:
        return f"the algorithm fourier mixes all fields, got groups={groups}; choose dense"
    try:
        fourier_frames(work.group, work.kernel_size, filters)
    except ValueError as error:
        return str(error)
    return None


def set_algorithm(model: nn.Module, name: str) -> None:
    """Gives this algorithm to every group convolution of a model, `dense` to those that cannot take `fourier`."""
    for module in model.modules():
        current = getattr(module, "algorithm", None)
        if isinstance(current, Algorithm):
            cannot = name == "fourier" and current.refusal is not None
            setattr(module, "algorithm", current.renamed("dense" if cannot else name))  # noqa: B010, a module by type alone
