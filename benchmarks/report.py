"""What is printed and drawn: targets with their verdicts, aligned tables, plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

SIGNS = {">=": float.__ge__, "<=": float.__le__, "<": float.__lt__, "==": float.__eq__}


@dataclass(frozen=True)
class Target:
    """A measured value and the bound it should keep; the value is None if it could not be obtained."""

    name: str
    value: float | None
    sign: str
    bound: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value is not None and SIGNS[self.sign](float(self.value), float(self.bound))

    @property
    def verdict(self) -> str:
        return "ok" if self.met else "MISSED" if self.value is not None else "not obtained"

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}{self.unit} {self.verdict}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def pair_cells(rows: Sequence[Mapping[str, Any]], what: str) -> tuple[list[str], list[list[str]]]:
    """Header and cells for what `measure.compare_pairs` found; what was added to its rows comes last."""
    _, first, second, ratio, *others = rows[0]
    cells = [[row["shape"], *(f"{1000 * row[name]:.1f} ms" for name in (first, second)), f"{row[ratio]:.2f}x"] for row in rows]
    return [what, first, second, "times as fast", *others], [
        [*cell, *(str(row[name]) for name in others)] for cell, row in zip(cells, rows, strict=True)
    ]


def human_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def human_bytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least squares slope of log y against log x."""
    log_x, log_y = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_x, mean_y = sum(log_x) / len(xs), sum(log_y) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True))
    return products / sum((x - mean_x) ** 2 for x in log_x)


class Line(NamedTuple):
    """One line of a plot. Colours are those of Okabe and Ito, with markers and dashes of their own, for readers who see few
    colours or none."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    colour: str


BLUE, VERMILLION = "#0072B2", "#D55E00"


def plot(
    lines: Sequence[Line], path: Path, *, title: str, xlabel: str, ylabel: str, log: bool = True, mark: float | None = None
) -> bool:
    """Draws lines on logarithmic axes, or with a logarithmic x axis alone; `mark` is a level. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(5.6, 4), layout="constrained")
    for line in lines:
        (axes.loglog if log else axes.semilogx)(line.xs, line.ys, line.style, color=line.colour, label=line.label)
    if log:
        ticks = sorted({x for line in lines for x in line.xs})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if mark is not None:
        axes.axhline(mark, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(f"{mark:g}", (0.01, mark), xycoords=("axes fraction", "data"), va="bottom")
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    print(f"drawn: {path.name}", flush=True)
    return True
