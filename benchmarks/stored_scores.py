"""Spatial attention on small maps: with stored scores, on the maps as they lie, beside fused attention on tokens.

python benchmarks/stored_scores.py [--rounds 9] [--out FILE]

Forward and backward pass on 64 maps of q, k and v that are parts of one map, as the projection makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from measure import THREADS, Disturbance, compare_pairs, options_of, write_measured
from report import pair_cells, table

from revit.nn import attention
from revit.nn.attention import attend_map
from revit.training.kept_memory import keep_memory

BATCH = 64


class Shape(NamedTuple):
    order: int
    fields: int
    side: int
    num_heads: int

    def __str__(self) -> str:
        heads = "one head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"{self.order} elements, {self.fields} fields, {self.side} px, {heads}"


SHAPES = [
    *(Shape(order, 12, 14, 1) for order in (4, 8, 16)),
    *(Shape(order, 24, 7, 2) for order in (4, 8, 16)),
    Shape(4, 13, 14, 1),
    Shape(4, 26, 7, 2),
    Shape(8, 12, 14, 2),
    Shape(16, 12, 14, 6),
]


def tasks(shape: Shape) -> dict[str, Callable[[], None]]:
    map_shape = (BATCH, 3 * shape.fields, shape.order, shape.side, shape.side)
    x = torch.randn(map_shape, requires_grad=True)
    grad = torch.randn(BATCH, shape.fields, *map_shape[2:])

    def run(scores: float) -> None:
        attention.SCORES = scores
        x.grad = None
        attend_map(*x.chunk(3, dim=1), 1, attention="spatial", num_heads=shape.num_heads).backward(grad)

    return {"fused": partial(run, 0), "stored": partial(run, float("inf"))}


def main() -> None:
    options = options_of(__doc__, "stored_scores.json", rounds=9)
    torch.set_num_threads(THREADS)
    keep_memory()
    disturbance, rows = Disturbance(), compare_pairs(SHAPES, tasks, options.rounds)
    print(table(*pair_cells(rows, "attention")))
    write_measured(f"stored_scores.py --rounds {options.rounds}", disturbance, options.out, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
