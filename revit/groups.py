r"""The discrete groups of the paper, as small values.

A group is named by two facts: how many rotations it has, and whether it has mirrors. Its elements are integers.
Element `m * N + r` means "first mirror the plane left to right if `m`, then turn it counter-clockwise by `2 pi r / N`",
so element 0 is the identity, rotations come first and mirrored elements follow.

>>> group = Group.parse("p4m")
>>> group, group.order
(Group('p4m'), 8)
>>> group.product[1, 3]  # 90 degrees after 270 degrees is the identity
tensor(0)
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_ORDER = 256
"""Largest group order accepted: filter banks grow with the square of the order."""

_NAME = re.compile(r"(?P<family>[pcd])_?(?P<rotations>[0-9]{1,9})(?P<mirrors>m?)")
_EXAMPLES = "z2, z2m, p4, p4m, p8, p8m, p12, p16"


@dataclass(frozen=True, repr=False)
class Group:
    """A finite group of rotations (and mirrors) of the plane about a point.

    `rotations` is N, the number of rotations by multiples of `360 / N` degrees; `reflections` adds the N mirrors.
    Paper names: `z2` (N = 1), `z2m` (N = 1 with mirrors), `pN`, `pNm`.
    """

    rotations: int
    reflections: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rotations, int) or isinstance(self.rotations, bool) or self.rotations < 1:
            raise ValueError(f"a group needs a whole number of rotations >= 1, got {self.rotations!r}; try {_EXAMPLES}")
        if not isinstance(self.reflections, bool):
            raise ValueError(f"reflections is True or False, got {self.reflections!r}")
        if self.order > MAX_ORDER:
            largest = MAX_ORDER // (2 if self.reflections else 1)
            raise ValueError(
                f"group {self.name} has {self.order} elements, at most {MAX_ORDER} are supported; "
                f"the nearest that works is p{largest}{'m' * self.reflections}"
            )

    @classmethod
    def parse(cls, name: str | Group) -> Group:
        """The group of a name: the paper's (`z2`, `z2m`, `p4`, `p4m`) or Schoenflies' (`C4`, `D4`), in either case."""
        if isinstance(name, Group):
            return name
        if not isinstance(name, str):
            raise ValueError(f"a group is given by its name or as a Group, got {name!r}; try {_EXAMPLES}")
        text = name.strip().lower()
        if text in ("z2", "z2m"):
            return cls(1, text == "z2m")
        match = _NAME.fullmatch(text)
        if match is None or (match["mirrors"] and match["family"] != "p"):
            raise ValueError(f"unknown group {name!r}; try {_EXAMPLES} (or C4, D4, ...)")
        rotations, mirrored = int(match["rotations"]), bool(match["mirrors"]) or match["family"] == "d"
        if rotations < 1:
            raise ValueError(f"group {name!r} has no rotation, not even the identity; the nearest is z2 or z2m")
        if text.replace("_", "") == "d2":
            # The released code calls the group of one mirror "D2": say which one this is.
            warnings.warn("group 'D2' is read as p2m (4 elements); for the mirror alone write 'z2m'", stacklevel=2)
        return cls(rotations, mirrored)

    @property
    def name(self) -> str:
        family = "z2" if self.rotations == 1 else f"p{self.rotations}"
        return family + "m" * self.reflections

    @property
    def order(self) -> int:
        """Number of elements, |G|."""
        return self.rotations * (2 if self.reflections else 1)

    @property
    def is_exact(self) -> bool:
        """Whether every element moves the pixels of a square grid onto pixels (multiples of 90 degrees, mirrors)."""
        return 4 % self.rotations == 0

    def split(self, element: int) -> tuple[int, bool]:
        """The pair (r, m) of an element: r steps of rotation after a mirror if m."""
        if not 0 <= element < self.order:
            raise ValueError(f"group {self.name} has elements 0 to {self.order - 1}, got {element}")
        return element % self.rotations, element >= self.rotations

    def is_exact_element(self, element: int) -> bool:
        return 4 * self.split(element)[0] % self.rotations == 0

    def element_name(self, element: int) -> str:
        """What an element does, for tables: "90°" or "mirror, then 90°"."""
        r, mirrored = self.split(element)
        turn = f"{360 * r / self.rotations:g}°"
        if not mirrored:
            return turn
        return "mirror" if r == 0 else f"mirror, then {turn}"

    @cached_property
    def product(self) -> Tensor:
        """Multiplication table [G, G]: `product[a, b]` is "first b, then a"."""
        table = torch.empty(self.order, self.order, dtype=torch.long)
        for a in range(self.order):
            for b in range(self.order):
                (r1, m1), (r2, m2) = self.split(a), self.split(b)
                r = (r1 + (-r2 if m1 else r2)) % self.rotations
                table[a, b] = (m1 ^ m2) * self.rotations + r
        return table

    @cached_property
    def inverse(self) -> Tensor:
        """Inverse of each element [G]."""
        elements = [self.split(g) for g in range(self.order)]
        return torch.tensor([g if m else -r % self.rotations for g, (r, m) in enumerate(elements)])

    @cached_property
    def matrix(self) -> Tensor:
        """The elements as orthogonal matrices [G, 2, 2] (float64) on points (x, y), x to the right and y up."""
        mirror = torch.tensor([[-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        matrices = [rotation_matrix(*divmod(4 * r, self.rotations), self.rotations) for r in range(self.rotations)]
        if self.reflections:
            matrices += [rotation @ mirror for rotation in matrices]
        return torch.stack(matrices)

    def elements_of(self, subgroup: str | Group) -> list[int]:
        """Where the elements of a subgroup stand in this group: `p8.elements_of("p4") == [0, 2, 4, 6]`."""
        subgroup = Group.parse(subgroup)
        if self.rotations % subgroup.rotations or subgroup.reflections > self.reflections:
            raise ValueError(f"{subgroup.name} is not a subgroup of {self.name}")
        step = self.rotations // subgroup.rotations
        return [m * self.rotations + r * step for r, m in map(subgroup.split, range(subgroup.order))]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Group({self.name!r})"


def rotation_matrix(quarters: int, rest: int, rotations: int) -> Tensor:
    """Rotation by `quarters` quarter turns plus `rest / (4 rotations)` of a full turn, [2, 2]; quarter turns are exact."""
    angle = 2 * math.pi * rest / (4 * rotations)
    c, s = math.cos(angle), math.sin(angle)
    matrix = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return torch.linalg.matrix_power(quarter, quarters % 4) @ matrix
