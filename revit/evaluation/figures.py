"""Pictures of a run: curves, confusion matrix, calibration, anything by angle, contact sheet. One function each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from revit.evaluation.drawing import BLUE, COLUMN, GREY, LINE_STYLES, ORANGE, PAGE, SERIES_COLOURS, figure_file, one_line
from revit.evaluation.metrics import CalibrationBin, expected_calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ANNOTATED_CLASSES = 20
MAX_CELLS = 250
MAX_SHEET = 100
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss, accuracy and learning rate by epoch, from the rows of results.csv: numbers or text, accuracies between 0 and 1.

    A value that is missing or empty leaves a gap. The highest validation accuracy is marked.
    """
    if not rows:
        raise ValueError("no epochs to draw: the rows are empty")
    epochs = _column(rows, "epoch")
    with figure_file(path, PAGE, 58) as figure:
        loss, accuracy, rate = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1, 1, 0.55)})
        for axes, name, scale in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
            for split, label, colour, style in (("train", "training", BLUE, "-"), ("val", "validation", ORANGE, "--")):
                values = scale * _column(rows, f"{split}_{name}")
                axes.plot(epochs, values, style, color=colour, label=label, marker="o" if len(rows) < 25 else None)
        loss.set(title="Loss", xlabel="epoch", ylabel="cross-entropy (nats)")
        loss.legend()
        accuracy.set(title="Accuracy", xlabel="epoch", ylabel="correct (%)")
        _mark_highest(accuracy, epochs, 100 * _column(rows, "val_accuracy"))
        rates = _column(rows, "lr")
        largest = _largest(rates)
        power = math.floor(math.log10(1.01 * largest)) if largest > 0 else 0
        rate.plot(epochs, rates / 10.0**power, color=GREY, marker="o" if len(rows) < 25 else None)
        rate.set(title="Learning rate", xlabel="epoch", ylabel=f"step size (× 10{str(power).translate(_SUPERSCRIPT)})")
        rate.set_ylim(0, 1.08 * largest / 10.0**power or 1)
        for axes in (loss, accuracy, rate):
            if len(rows) < 3:
                axes.set_xlim(epochs[0] - 1, epochs[-1] + 1)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)


def draw_confusion(matrix: ArrayLike, classes: Sequence[str], path: Path) -> None:
    """A confusion matrix [K, K] of counts, rows the truth: shaded by the share of each row, with counts and percentages in the
    cells up to 20 classes. Rows of classes without samples stay grey. Above 250 classes a cell shows the largest of several."""
    counts = np.asarray(matrix)
    size = len(classes)
    if counts.shape != (size, size):
        raise ValueError(f"{size} classes need a matrix of {size} x {size}, got shape {list(counts.shape)}")
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100 * counts, totals, out=np.full((size, size), np.nan), where=totals > 0)
    block = math.ceil(size / MAX_CELLS)
    width = min(PAGE, max(COLUMN, 45 + 10 * size))
    with figure_file(path, width, 0.88 * width) as figure:
        from matplotlib.colors import PowerNorm

        axes = figure.subplots()
        axes.grid(False)
        axes.set_facecolor("#D9D9D9")
        # With many classes the errors spread thin: the scale is stretched at its lower end, or they would not be seen.
        scale = PowerNorm(1 if size <= ANNOTATED_CLASSES else 0.5, vmin=0, vmax=100)
        edges = (-0.5, size - 0.5, size - 0.5, -0.5)
        cells = _largest_of_blocks(shares, block)
        picture = axes.imshow(cells, cmap="Blues", norm=scale, interpolation="nearest", extent=edges)
        figure.colorbar(picture, cax=axes.inset_axes((1.03, 0, 0.035, 1)), label="share of the true class (%)")
        axes.spines[:].set_visible(False)
        axes.set(xlabel="predicted class", ylabel="true class")
        cell = 0.72 * width / size
        _name_classes(axes, classes, cell)
        if block > 1:
            axes.set_title(f"{size} classes; a cell shows the largest share among {block} x {block}")
        if size <= ANNOTATED_CLASSES:
            _annotate(axes, counts, shares, cell)


def draw_calibration(bins: Sequence[CalibrationBin], path: Path) -> None:
    """A reliability diagram: how often predictions of each confidence are right, and below it how many there are."""
    if not any(b.count for b in bins):
        raise ValueError("no predictions to draw: all calibration bins are empty")
    with figure_file(path, COLUMN, 95) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1)})
        for b in bins:
            if b.accuracy is None or b.confidence is None:
                continue
            width = 100 * (b.high - b.low)
            place = {"x": 50 * (b.low + b.high), "width": 0.92 * width}
            upper.bar(height=100 * b.accuracy, color=BLUE, **place)
            gap = {"height": 100 * (b.confidence - b.accuracy), "bottom": 100 * b.accuracy}
            upper.bar(color="none", edgecolor=ORANGE, hatch="/////", linewidth=0.8, **gap, **place)
            lower.bar(height=b.count, color=GREY, **place)
        upper.plot([0, 100], [0, 100], "--", color="black", linewidth=0.8)
        upper.set(xlim=(0, 100), ylim=(0, 100), ylabel="correct (%)")
        upper.set_title(f"Expected calibration error {100 * expected_calibration_error(bins):.1f} %")
        figure.legend(handles=_calibration_legend(), loc="outside lower center", ncols=3, handlelength=1.5, columnspacing=1.2)
        lower.set(xlabel="confidence (%)", ylabel="predictions")
        lower.yaxis.get_major_locator().set_params(integer=True, nbins=3)


def draw_polar(
    angles: Sequence[float], series: Mapping[str, Sequence[float]], path: Path, *, title: str = "", limit: float | None = None
) -> None:
    """Something by angle, in degrees counter-clockwise from the top. `limit` is the value of the outermost circle."""
    if not len(angles) or not series:
        raise ValueError("nothing to draw: give at least one angle and one series")
    order = np.argsort(np.mod(angles, 360), kind="stable")
    turns = np.mod(angles, 360)[order]
    gaps = np.diff(turns, append=turns[0] + 360)
    closed = len(turns) > 2 and gaps.max() < 1.5 * np.median(gaps) + 1e-9
    with figure_file(path, COLUMN, 92 + 5 * math.ceil(len(series) / 2)) as figure:
        axes: Any = figure.subplots(subplot_kw={"projection": "polar"})
        axes.set_theta_zero_location("N")
        for i, (name, values) in enumerate(series.items()):
            if len(values) != len(angles):
                raise ValueError(f"series {name!r} has {len(values)} values for {len(angles)} angles")
            ordered = np.asarray(values, dtype=float)[order]
            theta = np.radians(np.append(turns, turns[0]) if closed else turns)
            radius = np.append(ordered, ordered[0]) if closed else ordered
            style: dict[str, Any] = {"color": SERIES_COLOURS[i % 7], "linestyle": LINE_STYLES[i % 4]}
            axes.plot(theta, radius, label=one_line(name, 40), marker="o" if len(turns) <= 24 else None, **style)
        _draw_circles(axes, limit, max(_largest(np.asarray(values, dtype=float)) for values in series.values()))
        if title:
            axes.set_title(title, loc="center", pad=8)
        figure.legend(loc="outside lower center", ncols=2)


def draw_sheet(images: ArrayLike, titles: Sequence[str], path: Path) -> None:
    """A contact sheet of images [N, C, H, W] with values 0 to 1, at most 100. One channel is grey, three are RGB; of two the
    mean is shown and of more the first three, which the heading states."""
    pixels = np.nan_to_num(np.asarray(images, dtype=np.float32)).clip(0, 1)
    if pixels.ndim != 4 or not 1 <= len(pixels) <= MAX_SHEET or len(titles) != len(pixels):
        raise ValueError(
            f"a sheet shows 1 to {MAX_SHEET} images [N, C, H, W] with a title each, got {list(pixels.shape)} and {len(titles)}"
        )
    shown, heading = visible_channels(pixels)
    count, (height, width) = len(shown), shown.shape[1:3]
    ideal = math.sqrt(1.4 * count * height / width)
    choices = range(max(math.ceil(0.8 * ideal), min(count, 4)), min(12, count, math.ceil(1.25 * ideal)) + 1)
    columns = min(choices, key=lambda c: (-count % c, abs(c - ideal)), default=min(12, count))
    rows = math.ceil(count / columns)
    cell = min(30.0, PAGE / columns)
    letters = max(6, int(cell / 1.4))  # letters of 6 points are about 1.4 mm wide
    with figure_file(path, cell * columns, rows * (cell * height / width + 3.5) + (6 if heading else 1)) as figure:
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.015, h_pad=0.015, wspace=0.02, hspace=0.01)
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, image, title in zip(grid, shown, titles, strict=False):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(one_line(title, letters), fontsize=6, fontweight="normal", loc="center", pad=2, parse_math=False)
        for axes in figure.axes:
            axes.set_axis_off()
        if heading:
            figure.suptitle(heading, fontsize=7)


def visible_channels(pixels: NDArray[np.float32]) -> tuple[NDArray[np.float32], str]:
    """Images [N, H, W] or [N, H, W, 3], and what was done to the channels, if anything."""
    channels = pixels.shape[1]
    if channels == 1:
        return pixels[:, 0], ""
    if channels == 2:
        return pixels.mean(axis=1), "mean of 2 channels"
    heading = "" if channels == 3 else f"channels 1 to 3 of {channels} as red, green, blue"
    return pixels[:, :3].transpose(0, 2, 3, 1), heading


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    """One column as numbers; what is missing or empty is NaN."""
    values = [row.get(key) for row in rows]
    return np.array([math.nan if value in (None, "") else float(value) for value in values])


def _largest(values: NDArray[Any]) -> float:
    """The largest finite value, 0 if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _mark_highest(axes: Axes, epochs: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    if np.isnan(values).all():
        return
    highest = int(np.nanargmax(values))
    note = f"highest: {values[highest]:.1f} % (epoch {epochs[highest]:g})"
    ring = axes.plot(epochs[highest], values[highest], "o", color="none", markeredgecolor=ORANGE, markersize=7, label=note)
    axes.legend(handles=ring, loc="best")


def _largest_of_blocks(shares: NDArray[Any], block: int) -> NDArray[Any]:
    """[K, K] -> the maxima of square blocks; a block without any value stays NaN."""
    if block == 1:
        return shares
    padding = -len(shares) % block
    padded = np.pad(shares, (0, padding), constant_values=np.nan)
    blocks = padded.reshape(len(padded) // block, block, len(padded) // block, block)
    return np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1)


def _name_classes(axes: Axes, classes: Sequence[str], cell: float) -> None:
    """Tick labels: all up to 40 classes, then one in so many; turned where they do not fit their cell of so many mm."""
    step = math.ceil(len(classes) / 40)
    places = range(0, len(classes), step)
    names = [one_line(classes[place], 18) for place in places]
    font = 7 if len(places) <= 20 else 5
    fits = 0.19 * font * max(map(len, names)) <= cell * step
    turn: dict[str, Any] = {}
    if not fits:
        turn = {"rotation": 45, "va": "top"} if len(places) <= 20 else {"rotation": 90, "va": "center"}
        turn |= {"ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(places, names, fontsize=font, parse_math=False, **turn)
    axes.set_yticks(places, names, fontsize=font, parse_math=False)


def _annotate(axes: Axes, counts: NDArray[Any], shares: NDArray[Any], cell: float) -> None:
    """Count and percentage in each cell that has any, as large as a cell of so many mm allows."""
    letters = max(4, len(str(counts.max())))
    points = cell * 72 / 25.4
    font = min(7.0, max(4.0, 0.9 * points / (0.65 * letters)), 0.9 * points / 2.5)
    for row, column in np.argwhere(counts > 0):
        share = shares[row, column]
        percent = f"{share:.0f} %" if share >= 0.5 else "<1 %"
        colour = "white" if share > 65 else "black"
        text = f"{counts[row, column]}\n{percent}"
        axes.text(column, row, text, ha="center", va="center", fontsize=font, color=colour, linespacing=1.1)


def _draw_circles(axes: Any, limit: float | None, largest: float) -> None:
    """A few circles, the outermost at the limit or beyond the largest value, labelled above the curves: matplotlib's own labels
    lie below them."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(4).tick_values(0, limit or largest or 1.0)
    circles = [float(tick) for tick in ticks if tick > 0 and (limit is None or tick <= 1.0001 * limit)]
    axes.set_ylim(0, 1.03 * (limit or circles[-1]))
    axes.set_yticks(circles, [""] * len(circles))
    axes.spines["polar"].set_visible(False)
    for circle in circles:
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
        place = {"ha": "center", "va": "center", "fontsize": 6, "color": GREY, "zorder": 5}
        axes.text(math.radians(67.5), circle, f"{circle:g}", bbox=paper, **place)


def _calibration_legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=BLUE, label="correct"),
        Patch(facecolor="none", edgecolor=ORANGE, hatch="/////", label="gap to confidence"),
        Line2D([], [], color="black", linestyle="--", linewidth=0.8, label="ideal"),
    ]
