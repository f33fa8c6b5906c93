"""Figures 1 and 4 of the paper, drawn from numbers: accuracies as bubbles, and what interpolation does to a small image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revit.actions import act_on_plane
from revit.evaluation.drawing import BLUE, COLUMN, GREEN, GREY, ORANGE, figure_file
from revit.groups import Group
from revit.reproduce.paper import PaperTable, paper_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAMILY_STYLES = {"G-CSA": (BLUE, "o"), "G-SA": (ORANGE, "s"), "G-CNN": (GREEN, "^"), "alpha-G-CNN": ("#CC79A7", "D")}
AREA = 18.0
"""Square points of a bubble for each element of its group."""
SQUARES = {"o": 4 / math.pi, "s": 1.0, "^": 2.0, "D": 1.0}
"""Matplotlib gives a marker the size of a square: how many times larger than the marker it is."""

PATTERN = ("         ", "         ", "   ###   ", "   #     ", "   ##    ", "   #     ", "   #     ", "         ", "         ")


@dataclass(frozen=True)
class BubblePoint:
    """A model of Figure 1: accuracies in percent. One of them may be missing; such a point stands beside the chart."""

    family: str
    group: str
    rotmnist: float | None
    pcam: float | None
    ours: bool

    def __post_init__(self) -> None:
        if self.family not in FAMILY_STYLES:
            raise ValueError(f"unknown family {self.family!r}; choose {', '.join(FAMILY_STYLES)}")
        if self.rotmnist is None and self.pcam is None:
            raise ValueError(f"{self.family} {self.group}: give the accuracy on RotMNIST, on PCam, or both")


def paper_points() -> list[BubblePoint]:
    """The paper's models by family and group. Where Tables 1 and 3 have two sizes of one (G-CSA on RotMNIST), Table 3's."""
    tables = paper_tables()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name in ("table1", "table3a", "table3c"):
        for (family, group), accuracies in _accuracies(tables[name]).items():
            found.setdefault((family, group), {}).update(accuracies)
    return [BubblePoint(*key, both.get("rotmnist"), both.get("pcam"), ours=False) for key, both in found.items()]


def draw_bubbles(points: Sequence[BubblePoint], path: Path) -> None:
    """Figure 1: accuracy on PCam over that on RotMNIST, each bubble's area proportional to |G|.

    The paper's models are hollow, ours filled. Models with one accuracy of the two stand in strips at the right and below.
    """
    if not points:
        raise ValueError("no models to draw: the list of points is empty")
    right = [point for point in points if point.rotmnist is None]
    below = [point for point in points if point.pcam is None]
    with figure_file(path, COLUMN, 92) as figure:
        shape: dict[str, Any] = {"width_ratios": (1, 0.26) if right else (1,), "height_ratios": (1, 0.13) if below else (1,)}
        grid = figure.add_gridspec(1 + bool(below), 1 + bool(right), **shape)
        chart = figure.add_subplot(grid[0, 0])
        panels = [(chart, [point for point in points if point not in right and point not in below])]
        if right:
            panels.append((figure.add_subplot(grid[0, 1], sharey=chart), right))
            panels[-1][0].set(xlim=(-1, 2.8), xticks=())
            note = panels[-1][0].annotate(
                "PCam\nonly", (0.5, 0), (0, -5), "axes fraction", "offset points", ha="center", va="top"
            )
            note.set_in_layout(False)  # it stands beside the strip below or the label of the axis
        if below:
            panels.append((figure.add_subplot(grid[1, 0], sharex=chart), below))
            panels[-1][0].set(ylim=(-1, 1), yticks=(), ylabel="RotMNIST\nonly")
        chart.margins(0.1)
        for axes, shown in panels:
            for point in shown:
                _draw_bubble(axes, point)
            if axes is not chart:
                axes.tick_params(labelleft=False, left=False)
        if below:
            chart.tick_params(labelbottom=False)
        chart.set_ylabel("PCam accuracy (%)")
        (panels[-1][0] if below else chart).set_xlabel("RotMNIST accuracy (%)")
        entries = _bubble_legend(points)
        columns = math.ceil(len(entries) / 2)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, columnspacing=1.5, handletextpad=0.5)
        figure.draw_without_rendering()  # the layout decides where the bubbles are, and they where the names may be
        for axes, shown in panels:
            _name_bubbles(axes, shown)


def turned_patterns() -> dict[str, Tensor]:
    """The panels of Figure 4 [H, W]: a small image, turned by quarter and by eighth turns, which are bilinear."""
    image = torch.tensor([[float(cell != " ") for cell in row] for row in PATTERN], dtype=torch.float64)

    def turn(*elements: int) -> Tensor:
        turned = image
        for element in elements:
            turned = act_on_plane(turned, "p8", element)
        return turned

    return {
        "image": image,
        "90°": turn(2),
        "4 × 90°": turn(*[2] * 4),
        "45°": turn(1),
        "45° and back": turn(1, 7),
        "8 × 45°": turn(*[1] * 8),
    }


def draw_interpolation(path: Path) -> None:
    """Figure 4: turns by 90 degrees move pixels onto pixels, turns by 45 degrees mix them, and no turn back undoes it."""
    panels = turned_patterns()
    with figure_file(path, COLUMN, 66) as figure:
        grid = figure.subplots(2, 3)
        for axes, (name, image) in zip(grid.flat, panels.items(), strict=True):
            picture = axes.imshow(image.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(name, loc="center", pad=3)
            axes.set_xlabel(_what_happened(name, image, panels["image"]), labelpad=3)
            _draw_grid(axes, len(image))
        figure.colorbar(picture, ax=grid, shrink=0.6, aspect=25, pad=0.02, label="pixel value")


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Mean absolute difference over the mean absolute value of what was expected."""
    return ((found - expected).abs().sum() / expected.abs().sum()).item()


def _what_happened(name: str, image: Tensor, original: Tensor) -> str:
    if name == "image":
        return f"{len(image)} × {len(image)} pixels"
    if name in ("90°", "45°"):
        mixed = int(((image > 1e-9) & (image < 1 - 1e-9)).sum())
        return f"{mixed} mixed pixels"
    error = 100 * relative_distance(image, original)
    return f"error {error:.1f} %" if error else "error 0 %"


def _draw_grid(axes: Axes, size: int) -> None:
    """Lines between the pixels instead of ticks."""
    axes.grid(False)
    axes.set(xticks=(), yticks=())
    for line in range(1, size):
        axes.axvline(line - 0.5, color="#D9D9D9", linewidth=0.4)
        axes.axhline(line - 0.5, color="#D9D9D9", linewidth=0.4)
    axes.spines[:].set_visible(True)


def _accuracies(table: PaperTable) -> dict[tuple[str, str], dict[str, float]]:
    """Family and group of each row -> its accuracies by dataset."""
    return {
        (row.family, row.group): {column: value.mean for column, value in row.values.items()}
        for row in table.rows.values()
        if row.family and row.group
    }


def _position(point: BubblePoint) -> tuple[float, float]:
    """Where a bubble stands in its panel; beside the chart, attentive networks stand right of the others."""
    place = 1.4 * (point.family == "alpha-G-CNN")
    return place if point.rotmnist is None else point.rotmnist, 0 if point.pcam is None else point.pcam


def _draw_bubble(axes: Axes, point: BubblePoint) -> None:
    colour, marker = FAMILY_STYLES[point.family]
    x, y = _position(point)
    style: dict[str, Any] = {"edgecolors": colour, "linewidths": 1.1, "clip_on": False}
    face: dict[str, Any] = (
        {"facecolors": colour, "alpha": 0.6, "zorder": 2} if point.ours else {"facecolors": "none", "zorder": 3}
    )
    axes.scatter([x], [y], _square(point), marker=marker, **style, **face)


def _square(point: BubblePoint) -> float:
    """The size that gives a marker the area of its group."""
    return AREA * Group.parse(point.group).order * SQUARES[FAMILY_STYLES[point.family][1]]


def _bubble_legend(points: Sequence[BubblePoint]) -> list[Any]:
    """Families, then sizes, then (if there are any of ours) what filled means."""
    from matplotlib.lines import Line2D

    def entry(label: str, colour: str, marker: str, area: float, *, filled: bool = False) -> Line2D:
        face = colour if filled else "none"
        style: dict[str, Any] = {"linestyle": "none", "markersize": area**0.5, "markeredgecolor": colour}
        return Line2D([], [], marker=marker, markerfacecolor=face, label=label, **style)

    shown = {point.family for point in points}
    entries = [entry(f.replace("alpha", "α"), *style, 36) for f, style in FAMILY_STYLES.items() if f in shown]
    entries += [entry(f"|G| = {order}", GREY, "o", SQUARES["o"] * AREA * order) for order in (1, 8)]
    if any(point.ours for point in points):
        entries += [entry("paper", GREY, "h", 36), entry("ours", GREY, "h", 36, filled=True)]
    return entries


def _name_bubbles(axes: Axes, points: Sequence[BubblePoint]) -> None:
    """Writes each group next to its bubble, on the side where it covers least of the bubbles and of other names."""
    dots = axes.figure.dpi / 72
    taken = []
    reaches = {}
    for point in points:
        reaches[point] = (0.71 if point.family == "alpha-G-CNN" else 0.5) * _square(point) ** 0.5 + 1.5
        x, y = axes.transData.transform(_position(point)) / dots
        taken.append((x - reaches[point], y - reaches[point], x + reaches[point], y + reaches[point]))
    for point, reach in reaches.items():
        x, y = axes.transData.transform(_position(point)) / dots
        width, height = 4.2 * len(point.group), 5.5
        boxes = {}
        for right, up in ((0, 1), (1, 0), (-1, 0), (0, -1), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7)):
            left = x + reach * right - width * (1 - _sign(right)) / 2
            low = y + reach * up - height * (1 - _sign(up)) / 2
            boxes[right, up] = (left, low, left + width, low + height)
        crowd = {side: sum(_overlap(box, other) for other in taken) for side, box in boxes.items()}
        side = min(crowd, key=lambda choice: crowd[choice])
        taken.append(boxes[side])
        corner = boxes[side][0] - x, boxes[side][1] - y
        axes.annotate(
            point.group, _position(point), corner, textcoords="offset points", fontsize=6.5, va="bottom",
            color=FAMILY_STYLES[point.family][0],
        )  # fmt: skip


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Common area of two boxes (left, low, right, high)."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
