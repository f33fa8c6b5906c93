"""How far each family of filters is from turning by 45 degrees: the table of docs/conventions.md.

python benchmarks/filter_error.py      # writes results/filter_error.json; then: python benchmarks/tables.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from measure import HERE, origin, write_report
from torch import Tensor

from revit.equivariance import equivariance_error
from revit.filters import num_functions
from revit.nn import LiftingConv

FILTERS, KERNELS, BLURS = ("interpolate", "steerable", "rbf"), (3, 5, 7), (1.0, 2.0)
SEED, SIZE, IMAGES, DRAWS = 0, 29, 16, 4


def blurred_noise(sigma: float) -> Tensor:
    """White noise blurred by a Gaussian, so that there is something that a rotation of the grid can keep."""
    radius = torch.arange(-6, 7, dtype=torch.float64)
    kernel = torch.exp(-(radius**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    x = torch.randn(IMAGES, 1, SIZE, SIZE, dtype=torch.float64)
    return F.conv2d(F.conv2d(x, kernel, padding=(0, 6)), kernel.transpose(2, 3), padding=(6, 0))


def error_at_45_degrees(filters: str, kernel_size: int, x: Tensor) -> float:
    """Mean relative error of a p8 lifting layer inside the disc, over random filters."""
    errors = []
    for _ in range(DRAWS):
        layer = LiftingConv("p8", 1, 16, kernel_size, padding=kernel_size // 2, filters=filters, bias=False).double()
        errors.append(equivariance_error(layer, x, "p8", relative=True, disc=True)[1].item())
    return sum(errors) / DRAWS


def main() -> None:
    torch.manual_seed(SEED)
    noise = {sigma: blurred_noise(sigma) for sigma in BLURS}
    rows = [
        {
            "filters": filters,
            "kernel_size": kernel_size,
            "parameters": num_functions(filters, kernel_size),
            **{f"blur {sigma:g}": error_at_45_degrees(filters, kernel_size, x) for sigma, x in noise.items()},
        }
        for filters in FILTERS
        for kernel_size in KERNELS
    ]
    report = {
        **origin("filter_error.py"),
        "seed": SEED, "data": f"Gaussian noise, {IMAGES} images of {SIZE}x{SIZE}", "rows": rows,
    }  # fmt: skip
    write_report(report, HERE / "results" / "filter_error.json")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
