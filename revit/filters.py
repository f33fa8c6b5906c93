r"""Families of filters: the functions on the plane that a convolution kernel is a weighted sum of.

A filter is `w(x) = sum_p weight[p] psi_p(x)`. What the functions `psi_p` are decides how well a filter can be turned:

| name          | functions                              | turned by                | exact for            |
|---------------|----------------------------------------|--------------------------|----------------------|
| `free`        | one for each pixel                     | moving pixels            | p4m and its subgroups|
| `steerable`   | circular harmonics on Gaussian rings   | evaluation at g^-1 x     | band-limited filters |
| `rbf`         | Gaussians centred on the pixels        | evaluation at g^-1 x     | smooth filters       |
| `interpolate` | one for each pixel                     | bilinear interpolation   | a baseline that fails|

Coordinates are in pixels about the centre of the kernel, x to the right and y up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from revit.groups import Group

FILTERS = ("free", "steerable", "rbf", "interpolate")
RBF_SIGMA = 0.75
"""Width of the Gaussians of `rbf` in pixels: smaller ones alias when turned, wider ones lose detail."""

PlaneFunctions = Callable[[Tensor], Tensor]
"""Takes points [..., 2] to the values [..., P] of P functions there."""


def check_filters(filters: str, group: Group, kernel_size: int) -> str:
    """The family to use for a group; "auto" is `free` where that is exact and `rbf` elsewhere."""
    turns_exactly = group.is_exact or kernel_size == 1
    if filters == "auto":
        return "free" if turns_exactly else "rbf"
    if filters not in FILTERS:
        raise ValueError(f"unknown filters {filters!r}; choose auto, {', '.join(FILTERS)}")
    if filters == "free" and not turns_exactly:
        raise ValueError(
            f"free filters turn by multiples of 90 degrees only, but {group} has {360 / group.rotations:g} degree steps; "
            "use filters='rbf' or 'steerable' (or 'interpolate', the baseline that is not equivariant)"
        )
    return filters


def kernel_grid(kernel_size: int) -> Tensor:
    """Coordinates (x, y) of the pixels of a kernel [K, K, 2], row by row from the top left."""
    axis = torch.arange(kernel_size, dtype=torch.float64) - (kernel_size - 1) / 2
    y, x = torch.meshgrid(-axis, axis, indexing="ij")
    return torch.stack((x, y), dim=-1)


def plane_functions(filters: str, kernel_size: int) -> PlaneFunctions:
    """The functions psi_p of `steerable` or `rbf`, scaled so that each has norm 1 on the upright kernel."""
    functions = {"steerable": circular_harmonics, "rbf": gaussians}[filters](kernel_size)
    norm = functions(kernel_grid(kernel_size)).flatten(0, 1).norm(dim=0)  # [P]
    return lambda points: functions(points) / norm


def gaussians(kernel_size: int) -> PlaneFunctions:
    """A Gaussian for each pixel of the kernel's disc, tapered to zero just outside the kernel.

    Without the taper a square kernel cuts a turned Gaussian differently in its corners than on its sides, and the filter is
    no longer the same one after a turn by 45 degrees.
    """
    centres = kernel_grid(kernel_size).flatten(0, 1)  # [K*K, 2]
    centres = centres[centres.norm(dim=1) <= kernel_size / 2]  # [P, 2]
    reach = (kernel_size + 1) / 2

    def functions(points: Tensor) -> Tensor:
        square_distance = (points.unsqueeze(-2) - centres).square().sum(-1)
        taper = (1 - points.square().sum(-1) / reach**2).clamp_min(0).square()
        return torch.exp(-square_distance / (2 * RBF_SIGMA**2)) * taper.unsqueeze(-1)

    return functions


def ring_profile(kernel_size: int) -> list[tuple[float, float, int]]:
    """Radius, width and highest angular frequency of each ring of `steerable`.

    Odd kernels follow the released code: 1, 6, 11, 18, 31, 46 functions for K = 1, 3, ..., 11. Even kernels have no
    pixel at the centre; their rings lie at half-integer radii, and the innermost (four pixels) carries frequency 1.
    """
    if kernel_size % 2 == 0:
        last = kernel_size // 2 - 1
        inner = [(r + 0.5, 0.6, 1 if r == 0 else 2 * r) for r in range(last)]
        return [*inner, (last + 0.5, 0.4 if last else 0.6, 2 if last else 1)]
    last = kernel_size // 2
    rings = [(0.0, 0.005, 0)]
    rings += [(float(r), 0.6, 2 * r - (r + 1) % 2) for r in range(1, last)]
    return rings if last == 0 else [*rings, (float(last), 0.4, 2)]


def circular_harmonics(kernel_size: int) -> PlaneFunctions:
    """cos(f theta) and sin(f theta) times a Gaussian ring, for each ring and each frequency up to its limit.

    The centre has no angle, so functions of frequency above 0 vanish there.
    """
    rings = ring_profile(kernel_size)

    def functions(points: Tensor) -> Tensor:
        radius = points.norm(dim=-1)
        theta = torch.atan2(points[..., 1], points[..., 0])
        off_centre = radius > 1e-9
        values = []
        for ring_radius, width, highest in rings:
            ring = torch.exp(-(radius - ring_radius).square() / (2 * width**2))
            values.append(ring)
            for frequency in range(1, highest + 1):
                values += [ring * wave(frequency * theta) * off_centre for wave in (torch.cos, torch.sin)]
        return torch.stack(values, dim=-1)

    return functions


@lru_cache
def centre_function(filters: str, kernel_size: int) -> int:
    """Which of the P functions sits on the centre pixel of an odd kernel (where a 1x1 filter lives in a KxK one)."""
    if kernel_size % 2 == 0:
        raise ValueError(f"a kernel of size {kernel_size} has no centre pixel; use an odd kernel_size")
    if filters == "steerable":
        return 0
    if filters == "rbf":
        return int(plane_functions("rbf", kernel_size)(torch.zeros(2, dtype=torch.float64)).argmax())
    return kernel_size**2 // 2


@lru_cache
def num_functions(filters: str, kernel_size: int) -> int:
    """P, the number of parameters of one filter."""
    if filters in ("free", "interpolate"):
        return kernel_size**2
    return plane_functions(filters, kernel_size)(torch.ones(2, dtype=torch.float64)).shape[-1]
