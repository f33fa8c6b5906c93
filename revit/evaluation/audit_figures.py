"""Pictures of an audit: where the error arises, at which angles, and what turns with the image: features and attention.

The numbers come from `audit_model` and `errors_by_angle`; the other pictures ask a model about one image. Each works for any
module; one without feature maps, or without attention, gets no picture of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.actions import act_on_plane
from revit.data.cache import whole_file
from revit.equivariance import transform
from revit.evaluation.audit import Audit
from revit.evaluation.drawing import BLUE, GREY, ORANGE, PAGE, figure_file, one_line
from revit.evaluation.figures import draw_polar
from revit.evaluation.generalisation import ByAngle
from revit.evaluation.inference import evaluating
from revit.evaluation.stages import OUTPUT, read_stages
from revit.evaluation.turning import Fill, turn_by_angle, turn_by_element
from revit.evaluation.visible import (
    as_pixels,
    attention_inputs,
    few_elements,
    find_maps,
    one_element,
    one_image,
    pixel_at,
    turned_pixel,
    unusual_places,
    varying_fields,
)
from revit.groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

MEASURES = {
    "logit_error": "Relative change of the logits",
    "top_class_difference": "Change of the predicted class's probability",
    "changed_percent": "Changed answers (%)",
}
"""What `draw_errors_by_angle` can draw, and its heading."""

MAX_LABELS = 32
MAX_ELEMENTS = 8  # of a field that are shown one by one
FIELDS = 4  # shown where there are no elements to show
QUERIES = 3
FRAMES, FRAME_MS, TILE = 24, 160, 112
HEADING, GAP = 13, 4  # mm above a grid of panels, and between its rows


def draw_stage_errors(audit: Audit, path: Path, *, tolerance: float | None = None) -> None:
    """The relative error of every stage, in the order of computation: one mark per element, their mean as a line.

    The tolerance is one for the largest error under exact elements, which is drawn too. An error of 0 lies on the lower edge,
    one without bound (a stage that changed its shape) on the upper.
    """
    limit = audit.tolerance if tolerance is None else tolerance
    names = list(audit.stages)
    shown = range(1, len(audit.elements)) if len(audit.elements) > 1 else range(1)
    errors = np.array([[stage.relative[g] for g in shown] for stage in audit.stages.values()])  # [stages, elements]
    worst = np.array([audit.worst(name) for name in names])
    exact = np.array([audit.exact[g] for g in shown])
    marks = np.concatenate((errors.ravel(), worst))
    low, high = _log_limits(np.append(marks, audit.tolerance if limit == 0 else limit))
    places = np.arange(len(names))
    broken = audit.broken_stage(limit)

    def place(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(np.isfinite(values), values, high).clip(low, high)

    with figure_file(path, PAGE, 88 if len(names) <= 8 else 104) as figure:
        axes = figure.subplots()
        axes.set_yscale("log")
        size = 4 if len(names) <= 60 else 2.5
        kinds = (("exact element", exact, BLUE, "o", "-"), ("interpolated element", ~exact, ORANGE, "^", "--"))
        for label, chosen, colour, marker, line in kinds:
            if not chosen.any():
                continue
            values = errors[:, chosen]
            axes.plot(places, place(values.mean(axis=1)), line, color=colour, label=f"mean, {label}s", zorder=2)
            spread = np.linspace(-0.18, 0.18, chosen.sum()) if chosen.sum() > 1 else np.zeros(1)
            style: dict[str, Any] = {"color": colour, "markersize": size, "markeredgewidth": 0, "clip_on": False, "zorder": 3}
            dots = axes.plot(places[:, None] + spread, place(values), marker, alpha=0.75, **style)
            dots[0].set_label(f"one {label}")
        dashes: dict[str, Any] = {
            "color": "black",
            "markersize": 1.6 * size,
            "markeredgewidth": 1,
            "clip_on": False,
            "zorder": 3,
        }
        axes.plot(places, place(worst), "_", label="largest difference, exact elements", **dashes)
        axes.axhline(max(limit, low), color=GREY, linestyle="--", linewidth=0.9, label=f"tolerance {limit:g}")
        if broken is not None:
            where = names.index(broken)
            axes.axvspan(
                where - 0.5, where + 0.5, color="#F0E442", alpha=0.5, linewidth=0, zorder=0, label="first broken stage"
            )
        _label_decades(axes, low, high, zero=bool((marks == 0).any()), unbounded=not np.isfinite(marks).all())
        axes.set(xlim=(-0.6, len(names) - 0.4), ylabel="relative error", xlabel="stage, in the order of computation")
        axes.grid(False, axis="x")
        _label_stages(axes, names, broken)
        heading = f"Error of each stage under {audit.group}, {audit.samples:,} images"
        axes.set_title(
            heading if broken is None else f"{heading}; first broken stage: {one_line(broken, 32)}", parse_math=False
        )
        figure.legend(loc="outside lower center", ncols=3, handlelength=1.8)


def draw_errors_by_angle(by_angle: ByAngle, path: Path, *, measure: str = "logit_error") -> None:
    """What a turn by each angle changes, in the full frame and with only the central disc shown; see `MEASURES`."""
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; choose {', '.join(MEASURES)}")
    series = {}
    for label, found in (("full frame", by_angle.frame), ("central disc only", by_angle.disc)):
        if measure == "changed_percent":
            series[label] = [100 - agreement.consistency_percent for agreement in found]
        else:
            series[label] = [getattr(agreement, measure) for agreement in found]
    draw_polar(by_angle.degrees, series, path, title=f"{MEASURES[measure]}, {by_angle.samples:,} images")


def draw_turning_features(model: nn.Module, x: Tensor, group: Group | str, path: Path, *, fill: Fill) -> bool:
    """One image [1, C, H, W], turned by a few elements (rows), and its features: one field at every element of the group, or
    the fields that vary most where the model has no such axis (or a long one). Each row is the first one turned, and its
    columns trade places; the last column shows where that fails. False, and no picture, if the model has no feature map."""
    group = Group.parse(group)
    elements = few_elements(group)
    with evaluating(model):
        images = [turn_by_element(one_image(model, x), group, g, fill) for g in elements]
        stages = {g: read_stages(model, image) for g, image in zip(elements, images, strict=True)}
    reader = find_maps(stages, group)
    if reader is None:
        return False
    maps = [reader.read(stages[g]).cpu() for g in elements]
    expected = [transform(maps[0], group, g) for g in elements]
    shown, labels = _shown_maps(maps, group)
    scale = max(float(maps[0].abs().mean()), 1e-30)
    limits = {"vmin": float(shown[0].min()), "vmax": float(shown[0].max())}
    columns = len(labels) + 2
    cell = min(24.0, PAGE / columns)
    rows = [cell * image.shape[-2] / image.shape[-1] for image in images]
    with figure_file(path, cell * columns, _grid_height(rows)) as figure:
        grid = _grid(figure, rows, columns)
        for row, g, image, planes, value, wanted in zip(grid, elements, as_pixels(images), shown, maps, expected, strict=True):
            row[0].imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            row[0].set_ylabel(_two_lines(group.element_name(g)), fontsize=6)
            for axes, plane in zip(row[1:], planes, strict=False):
                axes.imshow(plane, cmap="viridis", interpolation="nearest", **limits)
            if value.shape != wanted.shape:
                _title(row[-1], "other shape")
                continue
            difference = (value - wanted).abs().flatten(1, -3).mean(1)[0]  # over fields and elements, [H, W]
            picture = row[-1].imshow((100 * difference / scale).numpy(), cmap="Reds", vmin=0, vmax=100, interpolation="nearest")
            _title(row[-1], f"error {short_number(float(difference.mean()) / scale)}")
        for axes, label in zip(grid[0], ("image", *labels), strict=False):
            _title(axes, _two_lines(label))
        _title(grid[0][-1], f"difference\n{grid[0][-1].get_title('center')}")
        bar = figure.colorbar(picture, cax=grid[-1][-1].inset_axes((0.05, -0.1, 0.9, 0.06)), orientation="horizontal")
        bar.ax.tick_params(labelsize=5, width=0.4, length=2, pad=1)
        bar.set_label("% of mean |f(x)|", fontsize=5, labelpad=1)
        figure.suptitle(f"Does every row show the first one, turned? Features of {one_line(reader.stage, 40)}", fontsize=8)
    return True


def write_turning_gif(
    model: nn.Module, x: Tensor, path: Path, *, fill: Fill, group: Group | str, classes: Sequence[str] | None = None
) -> None:
    """An endless film of one image [1, C, H, W] that turns in steps of 15 degrees, of its feature maps that vary most (the
    maximum over the group), and of the class that the model predicts, with its probability."""
    from PIL.Image import Dither

    group = Group.parse(group)
    degrees = [360 * i / FRAMES for i in range(FRAMES)]
    with evaluating(model):
        image = one_image(model, x)
        reader = find_maps({g: read_stages(model, turn_by_element(image, group, g, fill)) for g in few_elements(group)}, group)
        images = [turn_by_angle(image, angle, fill) for angle in degrees]
        stages = [read_stages(model, turned) for turned in images]
    # Of a map of classes: the share of the image that each class has.
    answers = [found[OUTPUT][0].double().softmax(0).reshape(found[OUTPUT].shape[1], -1).mean(1).cpu() for found in stages]
    tiles = [[pixels if pixels.ndim == 3 else np.stack([pixels] * 3, axis=-1)] for pixels in as_pixels(images)]
    if reader is not None:
        pooled = [maps.amax(2) if maps.ndim == 5 else maps for maps in (reader.read(found).cpu() for found in stages)]
        for field in varying_fields(pooled[0], FIELDS - 1):
            for frame, plane in zip(tiles, _coloured([maps[0, field].numpy() for maps in pooled]), strict=True):
                frame.append(plane)
    frames = []
    for angle, row, answer in zip(degrees, tiles, answers, strict=True):
        top = int(answer.argmax())
        name = one_line(classes[top] if classes is not None else f"class {top}", 24)
        changed = "" if top == int(answers[0].argmax()) else " (changed)"
        frames.append(_frame(row, f"{angle:.0f}°", f"{name}{changed}", float(answer[top])))
    palette = _montage(frames).quantize(colors=128)
    paletted = [frame.quantize(palette=palette, dither=Dither.NONE) for frame in frames]
    with whole_file(Path(path)) as file:
        paletted[0].save(file, "GIF", save_all=True, append_images=paletted[1:], duration=FRAME_MS, loop=0, optimize=False)


def draw_attention(model: nn.Module, x: Tensor, group: Group | str, path: Path, *, fill: Fill) -> bool:
    """What three pixels of one image [1, C, H, W] attend to, in the first and the last attention layer, before and after the
    image is turned, and the difference of the maps, one turned back. Colours are those of the square root: most weights are
    small. False, and no picture, if no layer of the model has an `attention_map`."""
    from matplotlib.colors import PowerNorm

    group = Group.parse(group)
    element = one_element(group)
    with evaluating(model):
        image = one_image(model, x)
        before, after = (attention_inputs(model, y) for y in (image, turn_by_element(image, group, element, fill)))
        if not before:
            return False
        layers = list(dict.fromkeys((next(iter(before)), list(before)[-1])))
        size = before[layers[0]][1].shape
        places = unusual_places(image, (size[-2], size[-1]), QUERIES, inside=not group.is_exact_element(element))
        cell = PAGE / (1 + 3 * len(layers)) if len(layers) > 1 else 24.0
        rows = [cell * max(image.shape[-2:]) / min(image.shape[-2:])] * len(places)
        with figure_file(path, cell * (1 + 3 * len(layers)), _grid_height(rows)) as figure:
            grid = _grid(figure, rows, 1 + 3 * len(layers))
            for row, place in zip(grid, places, strict=True):
                row[0].imshow(as_pixels([image])[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                _ring(row[0], pixel_at(place, (image.shape[-2], image.shape[-1])))
                for i, name in enumerate(layers):
                    (layer, upright), (_, turned) = before[name], after[name]
                    pixel = pixel_at(place, (upright.shape[-2], upright.shape[-1]))
                    moved = turned_pixel(pixel, (upright.shape[-2], upright.shape[-1]), group, element)
                    found = layer.attention_map(upright, *pixel)[0].float().cpu()
                    found_turned = layer.attention_map(turned, *moved)[0].float().cpu()
                    back = act_on_plane(found_turned, group, int(group.inverse[element]))
                    high = max(float(found.max()), float(found_turned.max()))
                    panels = row[1 + 3 * i : 4 + 3 * i]
                    for axes, plane, ring in zip(panels, (found, found_turned), (pixel, moved), strict=False):
                        axes.imshow(plane.numpy(), cmap="magma", norm=PowerNorm(0.5, 0, high), interpolation="nearest")
                        _ring(axes, ring)
                    panels[2].imshow((back - found).numpy(), cmap="RdBu_r", vmin=-high, vmax=high, interpolation="nearest")
                    _title(panels[2], f"up to {short_number(float((back - found).abs().max()))}")
            heads = ["image"]
            for which in ("first layer", "last layer")[: len(layers)]:
                heads += [f"{which}:\nattention", f"image turned:\n{group.element_name(element)}", "difference"]
            for axes, head in zip(grid[0], heads, strict=True):
                _title(axes, f"{head}\n{axes.get_title('center')}".rstrip())
            layer_names = " and ".join(one_line(name, 32) for name in layers)
            figure.suptitle(f"What a pixel (ring) attends to in {layer_names}", fontsize=8)
    return True


def short_number(value: float) -> str:
    """A number in a table or a heading: 0, 0.123, 1.2e-07."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞"
    return f"{value:.3g}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.1e}"


def _log_limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """Powers of ten around all values that have a logarithm; one more on the side of those that have none."""
    known = values[np.isfinite(values) & (values > 0)]
    first = math.floor(math.log10(known.min())) - bool((values == 0).any())
    last = math.floor(math.log10(known.max())) + 1 + (not np.isfinite(values).all())
    return 10.0**first, 10.0**last


def _label_decades(axes: Axes, low: float, high: float, *, zero: bool, unbounded: bool) -> None:
    first, last = round(math.log10(low)), round(math.log10(high))
    step = math.ceil((last - first) / 10)
    powers = range(first + zero, last + (not unbounded), step)
    ticks = [(10.0**power, f"$10^{{{power}}}$") for power in powers]
    ticks += [(low, "0")] * zero + [(high, "∞")] * unbounded
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def _label_stages(axes: Axes, names: Sequence[str], broken: str | None) -> None:
    """All names up to some number, then one in so many; the last one and the broken one in any case."""
    step = math.ceil(len(names) / MAX_LABELS)
    must = [len(names) - 1] + ([names.index(broken)] if broken is not None else [])
    others = [place for place in range(0, len(names), step) if all(abs(place - other) >= step for other in must)]
    places = sorted({*must, *others})
    labels = [one_line(names[place], 20) for place in places]
    turn: dict[str, Any] = {"rotation": 90, "fontsize": 6}
    if max(map(len, labels)) * len(labels) < 90:  # letters that fit side by side
        turn = {}
    elif len(labels) <= 8:
        turn = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(places, labels, parse_math=False, **turn)
    for label, place in zip(axes.get_xticklabels(), places, strict=True):
        label.set_fontweight("bold" if names[place] == broken else "normal")


def _shown_maps(maps: Sequence[Tensor], group: Group) -> tuple[list[NDArray[np.float32]], list[str]]:
    """Of each map [1, C, G, H, W] one field at every element, or of the maxima over the elements a few fields; with labels."""
    if maps[0].ndim == 5 and 1 < group.order <= MAX_ELEMENTS:
        (field,) = varying_fields(maps[0], 1)
        return [value[0, field].numpy() for value in maps], [group.element_name(h) for h in range(group.order)]
    flat = [value.amax(2) if value.ndim == 5 else value for value in maps]
    fields = varying_fields(flat[0], FIELDS)
    kind = "field" if maps[0].ndim == 5 else "channel"
    return [value[0, fields].numpy() for value in flat], [f"{kind} {field}" for field in fields]


def _grid_height(rows: Sequence[float]) -> float:
    return sum(rows) + GAP * (len(rows) - 1) + HEADING


def _grid(figure: Any, rows: Sequence[float], columns: int) -> Any:
    """Panels without ticks in rows of so many mm. Their places are plain arithmetic: a layout of so many takes seconds."""
    width, height = 25.4 * figure.get_size_inches()
    places = {"left": 9 / width, "right": 1, "bottom": 0, "top": 1 - HEADING / height, "wspace": 0.04}
    places |= {"hspace": GAP * len(rows) / sum(rows), "height_ratios": rows}
    figure.set_layout_engine("none")
    grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw=places)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
    return grid


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=6, fontweight="normal", loc="center", pad=2, parse_math=False)


def _two_lines(name: str) -> str:
    return name.replace(", ", ",\n")


def _ring(axes: Axes, pixel: tuple[int, int]) -> None:
    for colour, width in (("black", 2.2), ("white", 1.0)):
        axes.plot(
            pixel[1], pixel[0], "o", color="none", markeredgecolor=colour, markeredgewidth=width, markersize=7, clip_on=False
        )


def _coloured(planes: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Maps [H, W] in the colours of one scale, [H, W, 3]."""
    import matplotlib

    low, high = min(plane.min() for plane in planes), max(plane.max() for plane in planes)
    return [matplotlib.colormaps["viridis"]((plane - low) / max(high - low, 1e-12))[..., :3] for plane in planes]


def _frame(tiles: Sequence[NDArray[np.float32]], angle: str, answer: str, probability: float) -> Image:
    """One frame of the film: tiles [H, W, 3] side by side, below them the angle, the answer and a bar of its probability."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    gap, line = 6, 20
    width = gap + (TILE + gap) * max(len(tiles), 2)
    frame = Image.new("RGB", (width, TILE + 2 * gap + 2 * line), "white")
    for i, tile in enumerate(tiles):
        height, wide = tile.shape[:2]
        picture = Image.fromarray((255 * np.asarray(tile)).round().astype(np.uint8))
        size = (max(1, round(TILE * wide / max(height, wide))), max(1, round(TILE * height / max(height, wide))))
        corner = (gap + i * (TILE + gap) + (TILE - size[0]) // 2, gap + (TILE - size[1]) // 2)
        frame.paste(picture.resize(size, Image.Resampling.NEAREST), corner)
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 14)
    draw = ImageDraw.Draw(frame)
    draw.text((gap, TILE + 2 * gap - 2), f"{angle:>4}  {answer}, {100 * probability:.1f} %", fill="black", font=font)
    bar, top = width - 2 * gap, TILE + 2 * gap + line
    draw.rectangle((gap, top, gap + bar, top + line // 2), outline=GREY)
    if np.isfinite(probability):
        draw.rectangle((gap, top, gap + bar * probability, top + line // 2), fill=BLUE)
    return frame


def _montage(frames: Sequence[Image]) -> Image:
    """Some frames below each other: whatever colours the film has are in it."""
    from PIL import Image

    some = frames[::4]
    width, height = some[0].size
    sheet = Image.new("RGB", (width, height * len(some)))
    for i, frame in enumerate(some):
        sheet.paste(frame, (0, i * height))
    return sheet
