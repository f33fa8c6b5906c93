"""What groups cost, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revit.evaluation.drawing import GREY, LINE_STYLES, PAGE, SERIES_COLOURS, figure_file, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_BYTES = 4096  # memory comes in pages: a model that needs none above what the process holds is drawn at one
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANELS = (
    ("Multiply-adds", "per image (millions)", lambda r: (r["counted_convolution_macs"] + r["counted_attention_macs"]) / 1e6),
    ("Memory of a training step", "peak (MiB)", lambda r: max(r["step_bytes"], PAGE_BYTES) / 2**20),
    ("Time of a training step", "per image (ms)", lambda r: 1e3 * r["step_seconds"]),
)


def draw_cost(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Multiply-adds, memory and time against the order of the group, from the rows of `revit benchmark complexity`.

    A line joins the groups of rotations; hollow marks of the same colour are groups with mirrors, next to their order.
    """
    if not rows:
        raise ValueError("no costs to draw: the rows are empty")
    series: dict[tuple[str, str | None, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault((row["model"], row["attention"], row["projection"]), []).append(row)
    kinds = list(dict.fromkeys(key[:2] for key in series))
    projections = list(dict.fromkeys(key[2] for key in series))
    with figure_file(path, PAGE, 62 + 5 * -(-(len(series) + 1) // 3)) as figure:
        for axes, (title, unit, value) in zip(figure.subplots(1, 3), PANELS, strict=True):
            for key, members in series.items():
                i, j = kinds.index(key[:2]), projections.index(key[2])
                style: dict[str, Any] = {"color": SERIES_COLOURS[i % 7], "marker": MARKERS[(i + 3 * j) % 7]}
                style["markersize"] = max(2.5, 7 - 2 * i)  # of equal values the later ones must not hide the earlier
                turns = sorted((row for row in members if not _mirrors(row)), key=lambda row: row["order"])
                label = one_line(" ".join(part for part in key if part), 40)
                line = {"linestyle": LINE_STYLES[j % 4], "label": label}
                axes.plot([row["order"] for row in turns], [value(row) for row in turns], **style, **line)
                mirrored = [row for row in members if _mirrors(row)]
                hollow = {"linestyle": "", "markerfacecolor": "none"}
                axes.plot([1.12 * row["order"] for row in mirrored], [value(row) for row in mirrored], **style, **hollow)
            axes.set(title=title, xlabel="elements of the group", ylabel=unit, xscale="log", yscale="log")
            _name_orders(axes, rows)
            _name_values(axes)
        handles = figure.axes[0].get_legend_handles_labels()[0]
        if any(map(_mirrors, rows)):
            handles.append(_mirror_mark())
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=3)


def _mirrors(row: Mapping[str, Any]) -> bool:
    return str(row["group"]).endswith("m")


def _mirror_mark() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=GREY, linestyle="", marker="o", markersize=5, markerfacecolor="none", label="with mirrors")


def _name_orders(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A tick for each order, named by it and by its groups."""
    orders: dict[int, list[str]] = {}
    for row in rows:
        names = orders.setdefault(row["order"], [])
        if row["group"] not in names:
            names.append(row["group"])
    axes.set_xticks(list(orders), [f"{order}\n{chr(10).join(names)}" for order, names in orders.items()])
    axes.set_xticks([], minor=True)


def _name_values(axes: Axes) -> None:
    """Plain numbers at 1, 2 and 5 times a power of ten: costs are read off, not only compared."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
