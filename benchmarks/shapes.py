"""The same convolutions in the shapes that a CPU is fast at: fields with a filter of their own, and those of one pixel.

python benchmarks/shapes.py [--rounds 7] [--out FILE]

Forward and backward pass on 64 maps. "plain" is one `conv2d` of all channels; fields with filters of their own are filled up
and put side by side (`revit/nn/per_field.py`), a pixel is a product of matrices (`revit/nn/matrix_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from measure import THREADS, Disturbance, compare_pairs, options_of, write_measured
from report import pair_cells, table

from revit.groups import Group
from revit.nn import GroupConv, GroupLinear, convolution, per_field
from revit.training.kept_memory import keep_memory

BATCH = 64
WAYS = (per_field, "pays"), (convolution, "products_pay")


class Shape(NamedTuple):
    group: str
    fields: int
    times: int
    kernel_size: int
    side: int

    def layer(self) -> GroupConv | GroupLinear:
        if self.kernel_size == 1:
            return GroupLinear(self.group, self.fields, self.times * self.fields, bias=False, algorithm="dense")
        size = self.kernel_size
        return GroupConv(self.group, self.fields, self.fields, size, padding=size // 2, groups=self.fields, bias=False)

    def __str__(self) -> str:
        fields = (
            f"each of {self.fields} fields" if self.kernel_size > 1 else f"{self.fields} -> {self.times * self.fields} fields"
        )
        return f"{self.group}, {self.kernel_size} x {self.kernel_size}, {fields}, {self.side} px"


SHAPES = [
    *(Shape(group, 24, 1, 5, 14) for group in ("z2", "z2m", "p3", "p4", "p6")),
    *(Shape("p12", fields, 1, 5, 14) for fields in (7, 12)),
    Shape("p4", 24, 1, 5, 7),
    Shape("p4", 13, 1, 5, 14),
    *(Shape("p8", 12, times, 1, 14) for times in (1, 3, 4)),
    *(Shape("p4", 12, times, 1, 14) for times in (1, 4)),
    *(Shape("p4", 24, times, 1, 7) for times in (1, 2, 3)),
    Shape("p4m", 48, 3, 1, 14),
]


def tasks(shape: Shape) -> dict[str, Callable[[], None]]:
    layer, order = shape.layer(), Group.parse(shape.group).order
    x = torch.randn(BATCH, shape.fields, order, shape.side, shape.side, requires_grad=True)
    grad = torch.randn(BATCH, shape.fields * shape.times, order, shape.side, shape.side)

    def run(pays: bool) -> None:
        for place, name in WAYS:
            setattr(place, name, lambda *_: pays)
        x.grad = None
        layer.zero_grad()
        layer(x).backward(grad)

    return {"plain": partial(run, False), "in this shape": partial(run, True)}


def main() -> None:
    options = options_of(__doc__, "shapes.json", rounds=7)
    torch.set_num_threads(THREADS)
    keep_memory()
    disturbance, rows = Disturbance(), compare_pairs(SHAPES, tasks, options.rounds)
    print(table(*pair_cells(rows, "convolution")))
    write_measured(f"shapes.py --rounds {options.rounds}", disturbance, options.out, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
