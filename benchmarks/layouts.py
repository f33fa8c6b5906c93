"""Memory formats: the convolutions of a model on contiguous maps beside `channels_last`, with the copies there and back.

python benchmarks/layouts.py [--rounds 9] [--out FILE]

Forward and backward pass of one convolution of expanded filters, 64 maps. Attention and norms take contiguous maps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import THREADS, Disturbance, compare_pairs, options_of, write_measured
from report import pair_cells, table
from torch import Tensor

BATCH = 64


class Shape(NamedTuple):
    """`fields` -> `times * fields` fields on a group of this order, or each field for itself."""

    order: int
    fields: int
    times: int
    kernel_size: int
    side: int
    per_field: bool = False

    def __str__(self) -> str:
        kind = "each field alone" if self.per_field else f"{self.fields} -> {self.times * self.fields} fields"
        return f"{self.order} elements, {kind}, {self.kernel_size} x {self.kernel_size}, {self.side} px"


ORDERS = (4, 8, 16)
SHAPES = [
    *(Shape(order, 12, 1, 5, 14, per_field=True) for order in ORDERS),
    *(Shape(order, 24, 1, 3, 7, per_field=True) for order in ORDERS),
    *(Shape(order, 12, 3, 5, 14) for order in ORDERS),
    *(Shape(order, 12, 4, 1, 14) for order in ORDERS),
    *(Shape(order, 24, 4, 1, 7) for order in ORDERS),
]


def tasks(shape: Shape) -> dict[str, Callable[[], None]]:
    groups = shape.fields if shape.per_field else 1
    channels, out = shape.order * shape.fields, shape.order * shape.fields * shape.times
    x = torch.randn(BATCH, channels, shape.side, shape.side, requires_grad=True)
    weight = torch.randn(out, channels // groups, shape.kernel_size, shape.kernel_size, requires_grad=True)
    grad = torch.randn(BATCH, out, shape.side, shape.side)

    def run(memory_format: torch.memory_format) -> None:
        inputs: list[Tensor] = [tensor.contiguous(memory_format=memory_format) for tensor in (x, weight)]
        F.conv2d(*inputs, None, 1, shape.kernel_size // 2, 1, groups).contiguous().backward(grad)

    return {"contiguous": partial(run, torch.contiguous_format), "channels_last": partial(run, torch.channels_last)}


def main() -> None:
    options = options_of(__doc__, "layouts.json", rounds=9)
    torch.set_num_threads(THREADS)
    disturbance, rows = Disturbance(), compare_pairs(SHAPES, tasks, options.rounds)
    print(table(*pair_cells(rows, "convolution")))
    write_measured(f"layouts.py --rounds {options.rounds}", disturbance, options.out, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
