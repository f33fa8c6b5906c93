"""The MLP and spatial attention that stay in the Fourier basis between their two maps, beside the same layers computed densely.

python benchmarks/chains.py [--rounds 7] [--out FILE]

Forward and backward pass in training on 64 maps, 1 x 1 projections. The last column is what `auto` takes in one go; elsewhere
it goes layer by layer, most of them dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from measure import THREADS, Disturbance, compare_pairs, options_of, write_measured
from report import pair_cells, table

from revit.groups import Group
from revit.nn import GroupConvAttention, GroupMLP, set_algorithm
from revit.training.kept_memory import keep_memory

BATCH = 64


class Shape(NamedTuple):
    layer: str
    group: str
    fields: int
    side: int

    def __str__(self) -> str:
        return f"{self.layer}, {self.group}, {self.fields} fields, {self.side} px"

    def build(self) -> GroupMLP | GroupConvAttention:
        if self.layer == "attention":
            return GroupConvAttention(self.group, self.fields, 1, kernel_size=1, attention="spatial")
        return GroupMLP(self.group, self.fields, ratio=int(self.layer.split()[-1]))


MAPS = [("p8", 12, 14), ("p8", 24, 14), ("p8", 48, 14), ("p4m", 24, 14), ("p16", 12, 14), ("p16", 13, 7), ("p16", 24, 14)]
SHAPES = [Shape(layer, *shape) for shape in MAPS for layer in ("attention", "MLP of ratio 4")]


def tasks(shape: Shape) -> dict[str, Callable[[], None]]:
    x = torch.randn(BATCH, shape.fields, Group.parse(shape.group).order, shape.side, shape.side, requires_grad=True)
    grad = torch.randn_like(x)

    def task(algorithm: str) -> Callable[[], None]:
        layer = shape.build().train()
        set_algorithm(layer, algorithm)
        return lambda: layer(x).backward(grad)

    return {name: task(name) for name in ("dense", "fourier")}


def main() -> None:
    options = options_of(__doc__, "chains.json", rounds=7)
    torch.set_num_threads(THREADS)
    keep_memory()
    disturbance, rows = Disturbance(), compare_pairs(SHAPES, tasks, options.rounds)
    for shape, row in zip(SHAPES, rows, strict=True):
        least = shape.build().chain.least
        row["auto"] = "in one go" if least is not None and shape.side**2 >= least else "layer by layer"
    print(table(*pair_cells(rows, "layer")))
    write_measured(f"chains.py --rounds {options.rounds}", disturbance, options.out, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
