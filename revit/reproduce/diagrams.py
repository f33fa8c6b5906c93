"""Figures 2 and 3 of the paper, drawn from real layers: an "R" is lifted, projected and attended to, and these are its maps.

The layers have random weights of a fixed seed and the group is p4, so every map is exact and every drawing the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revit.evaluation.drawing import BLUE, GREEN, GREY, ORANGE, PAGE, SERIES_COLOURS, figure_file
from revit.groups import Group
from revit.models import create_model
from revit.nn import ConvProjection, LiftingConv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE, FIELDS, KERNEL, SEED = 20, 8, 5, 2
FIELD = 0
"""The field that is shown."""
QUERY = (9, 7)
"""The row and column whose neighbourhood and attention are shown: on the stem of the letter."""


@dataclass(frozen=True)
class GlyphMaps:
    """What the figures show: the image [H, W], the filters [G, K, K] of one field, the maps of F, Q, K, V [C, G, H, W]."""

    image: Tensor
    filters: Tensor
    lifted: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def draw_glyph(size: int) -> Tensor:
    """The letter R as an image [H, W] between 0 and 1, with soft edges: it has no symmetry at all."""
    centres = (torch.arange(size, dtype=torch.float64) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(-centres, centres, indexing="ij")

    def distance_to_line(x0: float, y0: float, x1: float, y1: float) -> Tensor:
        dx, dy = x1 - x0, y1 - y0
        along = (((x - x0) * dx + (y - y0) * dy) / (dx**2 + dy**2)).clamp(0, 1)
        return torch.hypot(x - x0 - along * dx, y - y0 - along * dy)

    bowl = (torch.hypot(x - 0.05, y - 0.3) - 0.35).abs().where(x > 0.05, torch.inf)
    lines = ((-0.35, -0.65, -0.35, 0.65), (-0.05, -0.05, 0.4, -0.65), (-0.35, 0.65, 0.05, 0.65), (-0.35, -0.05, 0.05, -0.05))
    distance = torch.stack([bowl, *(distance_to_line(*line) for line in lines)]).amin(dim=0)
    return torch.sigmoid((0.12 - distance) / 0.03)


@torch.no_grad()
def glyph_maps() -> GlyphMaps:
    """Lifts the glyph onto p4 (Eq. 7) and projects it (Eq. 8). Maps have a mean square of 1, as after a norm."""
    image = draw_glyph(SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        group = Group.parse("p4")
        options: dict[str, Any] = {"padding": KERNEL // 2, "bias": False, "filters": "steerable"}
        lift = LiftingConv(group, 1, FIELDS, KERNEL, **options).double()
        project = ConvProjection(group, FIELDS, KERNEL, projection="full", filters="steerable").double()
    lifted = lift(image[None, None])  # [1, C, G, H, W]
    scale = lifted.square().mean().rsqrt()
    q, k, v = project(scale * lifted)
    filters = lift.filters().unflatten(0, (FIELDS, group.order))[FIELD, :, 0]  # [G, K, K]
    return GlyphMaps(image, scale * filters, scale * lifted[0], q[0], k[0], v[0])


def attention_weights(q: Tensor, k: Tensor, element: int, position: tuple[int, int]) -> Tensor:
    """Eq. 10 for one query: A(x, g; y, h) [G, H, W] of maps [C, G, H, W], which sums to 1 over all (y, h)."""
    query = q[:, element, position[0], position[1]]
    scores = torch.einsum("c,cgyx->gyx", query, k) / len(query) ** 0.5
    return scores.flatten().softmax(0).view(scores.shape)


def draw_projection(path: Path) -> None:
    """Figure 2: the K x K neighbourhood in all elements of F gives one number of Q, K and V each; pixels become tokens."""
    maps = glyph_maps()
    group = Group.parse("p4")
    named = {"Q": (maps.q, BLUE), "K": (maps.k, SERIES_COLOURS[3]), "V": (maps.v, GREEN)}
    with figure_file(path, PAGE, 66) as figure:
        parts: Any = figure.subfigures(1, 3, width_ratios=(0.78, 1, 0.78))
        source, projection, tokens = parts
        sources = source.subplots(2, 2)
        for h, axes in enumerate(sources.flat):
            _show_map(axes, maps.lifted[FIELD, h], limit=maps.lifted[FIELD].abs().max().item())
            axes.set_title(group.element_name(h), loc="center", fontweight="normal", pad=3)
        source.suptitle(f"lifted map $F$, {_shape(maps.lifted)}:\n{KERNEL} × {KERNEL} pixels of all elements", fontsize=8)
        projected = projection.subplots(3, group.order)
        for row, (name, (values, colour)) in zip(projected, named.items(), strict=True):
            for h, axes in enumerate(row):
                _show_map(axes, values[FIELD, h])
            row[-1].set_ylabel(f"${name}=W_{name}*F$", color=colour, fontsize=9)
            row[-1].yaxis.set_label_position("right")
            _frame(row[0], QUERY, 1)
        for h, axes in enumerate(projected[0]):
            axes.set_title(group.element_name(h), loc="center", fontweight="normal", pad=3)
        projection.suptitle(f"Eq. 8: group convolutions $Q$, $K$, $V$,\neach {_shape(maps.q)}", fontsize=8)
        strips = tokens.subplots(3, 1)
        for axes, (values, colour) in zip(strips, named.values(), strict=True):
            _draw_tokens(axes, values, group)
            axes.set_ylabel("field", color=colour)
        strips[-1].set_xlabel("tokens by element and position")
        tokens.suptitle(f"flattened to tokens,\neach [{maps.q[0].numel()}, {FIELDS}]", fontsize=8)
        for axes in sources.flat:
            _frame(axes, QUERY, KERNEL)
            _join(axes, (QUERY[1] + KERNEL / 2, QUERY[0]), projected[0, 0], (QUERY[1], QUERY[0]))


def draw_architecture(path: Path) -> None:
    """Figure 3: (a) the network with the shapes of its maps, (b) lifting onto p4, (c) attention of one (x, g) to all (y, h)."""
    with figure_file(path, PAGE, 126) as figure:
        parts: Any = figure.subfigures(3, 1, height_ratios=(0.28, 0.48, 0.36))
        network, lifting, attention = parts
        _heading(network, "(a) network")
        _draw_network(network.subplots())
        _heading(lifting, r"(b) lifting (Eq. 7): each turned filter gives a map, $F(x,g)=\sum_{x'}f(x')\,k(g^{-1}(x'-x))$")
        _draw_lifting(lifting, glyph_maps())
        _heading(attention, r"(c) G-CSA (Eqs. 9, 10): attention $A(x,g;y,h)$ of one position and element to all of them")
        _draw_attention(attention, glyph_maps())


def _draw_lifting(figure: Any, maps: GlyphMaps) -> None:
    """The image, and for each element its turned filter above the map that it gives."""
    group = Group.parse("p4")
    grid = figure.subplots(2, 1 + group.order, height_ratios=(0.42, 1))
    grid[0, 0].set_axis_off()
    grid[0, 0].text(1, 0.5, "filter\n$k(g^{-1}\\,\\cdot)$", ha="right", va="center", transform=grid[0, 0].transAxes)
    _show(grid[1, 0], maps.image, cmap="gray", vmin=0, vmax=1)
    grid[1, 0].set_xlabel(f"image $f$, {_shape(maps.image)}")
    for g in range(group.order):
        _show_map(grid[0, 1 + g], maps.filters[g], limit=maps.filters.abs().max().item())
        picture = _show_map(grid[1, 1 + g], maps.lifted[FIELD, g], limit=maps.lifted[FIELD].abs().max().item())
        grid[1, 1 + g].set_xlabel(f"$F(x,g)$, $g$ = {group.element_name(g)}")
    figure.colorbar(picture, ax=grid[1, :], shrink=0.9, aspect=18, pad=0.01, label="value")


def _draw_attention(figure: Any, maps: GlyphMaps) -> None:
    """The query in its map, and its attention to the maps of each element."""
    from matplotlib.colors import LogNorm

    group = Group.parse("p4")
    weights = attention_weights(maps.q, maps.k, 0, QUERY)
    relative = weights * weights.numel()
    row = figure.subplots(1, 1 + group.order)
    _show_map(row[0], maps.lifted[FIELD, 0], limit=maps.lifted[FIELD].abs().max().item())
    row[0].set_xlabel("the query, $g$ = 0°")
    scale = LogNorm(0.1, relative.max().item(), clip=True)
    for h in range(group.order):
        picture = _show(row[1 + h], relative[h], cmap="Blues", norm=scale)
        row[1 + h].set_xlabel(f"$h$ = {group.element_name(h)}, sum {weights[h].sum().item():.2f}")
    figure.colorbar(picture, ax=row, shrink=0.9, aspect=18, pad=0.01, label="weight / mean weight")
    row[0].plot(QUERY[1], QUERY[0], "*", color=ORANGE, markersize=7, markeredgecolor="white", markeredgewidth=0.4, zorder=5)
    for axes, plane in zip(row[1:], weights, strict=True):
        y, x = divmod(int(plane.argmax()), plane.shape[1])
        axes.plot(x, y, "o", color="none", markeredgecolor=ORANGE, markersize=5)
        _join(row[0], (QUERY[1], QUERY[0]), axes, (x, y))


def _draw_tokens(axes: Axes, values: Tensor, group: Group) -> None:
    """Maps [C, G, H, W] as a matrix with one column for each token; ticks name the elements, a mark the shown pixel."""
    tokens = values.flatten(1)
    limit = values.abs().max().item()
    axes.imshow(tokens.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    axes.grid(False)
    positions = values[0, 0].numel()
    for h in range(1, group.order):
        axes.axvline(h * positions - 0.5, color="black", linewidth=0.5)
    shown = QUERY[0] * values.shape[-1] + QUERY[1]
    axes.plot([shown], [-1.2], marker="v", color=ORANGE, markersize=4, clip_on=False)
    axes.set_xticks([(h + 0.5) * positions for h in range(group.order)], [group.element_name(h) for h in range(group.order)])
    axes.set(yticks=())
    axes.tick_params(length=0)


def _draw_network(axes: Axes) -> None:
    """Boxes and arrows in mm; the shapes are those of a model that was run."""
    from matplotlib.patches import Circle

    with torch.random.fork_rng(devices=[]):
        model: Any = create_model("revit_tiny", group="p4", in_chans=1).eval()
    image = draw_glyph(28).float()
    with torch.no_grad():
        features = model.named_features(image[None, None])
        pooled = model.forward_head(features["pre_class"], pre_logits=True)
    axes.set(xlim=(0, 174), ylim=(3, 29), aspect="equal")
    axes.set_axis_off()
    middle = 17
    axes.imshow(image.numpy(), cmap="gray", extent=(0, 14, middle - 7, middle + 7), interpolation="nearest")
    boxes = (
        ("lifting\nlayer", 20, 34, ORANGE), ("norm", 47, 57, GREY), ("G-CSA", 60, 73, BLUE), ("norm", 85, 95, GREY),
        ("MLP", 98, 109, GREEN), ("max over $G$,\nmean over $x$", 126, 145, ORANGE), ("MLP", 152, 162, GREEN),
    )  # fmt: skip
    for name, left, right, colour in boxes:
        axes.add_patch(_box(left, right, middle - 5, middle + 5, edgecolor=colour, linewidth=1.2))
        axes.text((left + right) / 2, middle, name, ha="center", va="center", fontsize=7)
    axes.add_patch(_box(42, 118.5, middle - 7.5, middle + 11, edgecolor=GREY, linewidth=0.8, linestyle="--"))
    axes.text(119.5, middle + 10.5, f"× {len(model.stages[0].blocks)}", ha="left", va="top")
    stops = (14, 20, 34, 47, 57, 60, 73, 76, 80, 85, 95, 98, 109, 112, 116, 126, 145, 152, 162, 167)
    for start, end in zip(stops[::2], stops[1::2], strict=True):
        _arrow(axes, (start, middle), (end, middle))
    for branch, place in ((44.5, 78), (82.5, 114)):
        axes.add_patch(Circle((place, middle), 2, facecolor="none", edgecolor="black", linewidth=0.8))
        axes.text(place, middle - 0.2, "+", ha="center", va="center")
        axes.plot([branch, branch, place, place], [middle, middle + 8, middle + 8, middle + 4], color="black", linewidth=0.8)
        _arrow(axes, (place, middle + 4), (place, middle + 2))
    axes.text(167.5, middle, "logits", ha="left", va="center", fontsize=7)
    shown = (image[None], features["lift"][0], features["pre_class"][0], pooled[0], features["logits"][0])
    for x, values in zip((7, 38, 122, 148.5, 171), shown, strict=True):
        letters = "\n$C,\\ G,\\ H,\\ W$" if values.ndim == 4 else ""
        axes.text(x, middle - 8.5, f"{_shape(values)}{letters}", ha="center", va="top", fontsize=7, color=GREY)


def _box(left: float, right: float, low: float, high: float, **style: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    size = right - left, high - low
    return FancyBboxPatch((left, low), *size, boxstyle="round,pad=0,rounding_size=1", facecolor="none", **style)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    axes.annotate("", end, start, arrowprops=style)


def _join(start: Axes, begin: tuple[float, float], stop: Axes, end: tuple[float, float]) -> None:
    """A thin line from a point of one panel to a point of another."""
    from matplotlib.patches import ConnectionPatch

    style: dict[str, Any] = {"color": ORANGE, "linewidth": 0.6, "shrinkB": 2.5}
    line = ConnectionPatch(begin, end, "data", "data", axesA=start, axesB=stop, **style)
    line.set_in_layout(False)
    figure: Any = stop.get_figure(root=True)
    figure.add_artist(line)


def _heading(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.005, ha="left", fontsize=8, fontweight="bold")


def _shape(values: Tensor) -> str:
    return str(list(values.shape))


def _show(axes: Axes, values: Tensor, **style: Any) -> Any:
    axes.grid(False)
    axes.set(xticks=(), yticks=())
    axes.spines[:].set_visible(True)
    return axes.imshow(values.numpy(), interpolation="nearest", **style)


def _show_map(axes: Axes, values: Tensor, *, limit: float | None = None) -> Any:
    """A map or filter with zero white, red above and blue below."""
    limit = limit or values.abs().max().item()
    return _show(axes, values, cmap="RdBu_r", vmin=-limit, vmax=limit)


def _frame(axes: Axes, position: tuple[int, int], side: int) -> None:
    """Marks the side x side pixels around a position."""
    from matplotlib.patches import Rectangle

    corner = position[1] - side / 2, position[0] - side / 2
    axes.add_patch(Rectangle(corner, side, side, facecolor="none", edgecolor=ORANGE, linewidth=1.2))
