"""The four figures: whole files, areas and numbers that are right, maps that follow the equations."""

import math
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from revit.actions import act_on_plane
from revit.groups import Group
from revit.nn import attend
from revit.reproduce import (
    BubblePoint,
    diagrams,
    draw_architecture,
    draw_bubbles,
    draw_interpolation,
    draw_projection,
    figures,
    paper_points,
)
from revit.reproduce.diagrams import FIELD, QUERY, attention_weights, draw_glyph, glyph_maps

OURS = BubblePoint("G-CSA", "p12", 98.6, 90.1, ours=True)
COLUMN_WIDTH, PAGE_WIDTH = 88 / 25.4 * 200, 174 / 25.4 * 200  # pixels


def words(figure):
    """The texts of a figure, with its empty ones left out."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def check_png(path, width):
    from PIL import Image

    with Image.open(path) as image:
        assert image.format == "PNG" and 0.9 * width < image.width <= width
        assert np.asarray(image.convert("L")).std() > 5
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.fixture
def kept_figures(monkeypatch):
    """The figures that are drawn, kept instead of saved."""
    from matplotlib.figure import Figure

    kept = []

    @contextmanager
    def keep(path, width, height):
        figure = Figure(figsize=(width / 25.4, height / 25.4), layout="constrained")
        yield figure
        kept.append(figure)

    monkeypatch.setattr(figures, "figure_file", keep)
    monkeypatch.setattr(diagrams, "figure_file", keep)
    return kept


@pytest.mark.parametrize(
    ("draw", "width"),
    [
        (lambda path: draw_bubbles([*paper_points(), OURS], path), COLUMN_WIDTH),
        (lambda path: draw_bubbles([OURS], path), COLUMN_WIDTH),
        (draw_projection, PAGE_WIDTH),
        (draw_architecture, PAGE_WIDTH),
        (draw_interpolation, COLUMN_WIDTH),
    ],
    ids=["bubbles", "one bubble", "projection", "architecture", "interpolation"],
)
def test_files_are_whole_and_leave_randomness_alone(draw, width, tmp_path):
    state = torch.random.get_rng_state()
    draw(tmp_path / "figure.png")
    check_png(tmp_path / "figure.png", width)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_drawings_do_not_depend_on_the_seed():
    torch.manual_seed(1)
    first = glyph_maps()
    torch.manual_seed(2)
    assert torch.equal(first.q, glyph_maps().q)


def test_points_of_the_paper():
    points = {(point.family, point.group): (point.rotmnist, point.pcam) for point in paper_points()}
    assert points == {
        ("G-SA", "z2"): (96.37, 83.04), ("G-SA", "p4"): (97.30, 83.44), ("G-SA", "p8"): (97.90, 83.58),
        ("G-SA", "p4m"): (None, 84.76), ("G-CSA", "z2"): (95.97, 86.4), ("G-CSA", "p4"): (98.73, 90.38),
        ("G-CSA", "p8"): (98.92, 89.98), ("G-CSA", "p4m"): (None, 90.75), ("G-CNN", "z2"): (94.7, 84.07),
        ("G-CNN", "p4"): (98.21, 87.55), ("G-CNN", "p8"): (98.5, None), ("alpha-G-CNN", "p4"): (98.31, 88.66),
        ("G-CNN", "p4m"): (None, 88.36), ("alpha-G-CNN", "p4m"): (None, 89.12),
    }  # fmt: skip
    assert not any(point.ours for point in paper_points())


def marker_area(collection):
    """The area of a drawn marker in pixels, by the shoelace formula on its outline."""
    (outline,) = collection.get_paths()[0].to_polygons(closed_only=True)
    x, y = (outline @ collection.get_transforms()[0][:2, :2].T).T
    return 0.5 * abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1]))


def test_area_of_bubbles_is_the_order_of_the_group(kept_figures):
    points = [*paper_points(), OURS]
    draw_bubbles(points, "unused.png")
    found = []
    for axes in kept_figures[0].axes:
        for bubble in axes.collections:
            found.append((bubble.get_offsets()[0].tolist(), marker_area(bubble), len(bubble.get_facecolors()) > 0))
    assert len(found) == len(points)
    for point in points:
        if point.rotmnist is None or point.pcam is None:
            continue
        (bubble,) = [entry for entry in found if entry[0] == [point.rotmnist, point.pcam]]
        pixels = figures.AREA * (kept_figures[0].dpi / 72) ** 2
        assert bubble[1] == pytest.approx(pixels * Group.parse(point.group).order, rel=0.01)
        assert bubble[2] == point.ours  # hollow or filled
    beside = sorted(round(area / pixels) for place, area, _ in found if place[0] < 90 or place[1] < 70)
    assert beside == [8] * 5  # four p4m without RotMNIST, one p8 without PCam


def test_every_bubble_is_named_and_explained(kept_figures):
    draw_bubbles(paper_points(), "unused.png")
    draw_bubbles([*paper_points(), OURS], "unused.png")
    paper, both = map(words, kept_figures)
    for group in ("z2", "p4", "p8", "p4m"):
        assert paper.count(group) == sum(point.group == group for point in paper_points())
    assert {"G-CSA", "G-SA", "G-CNN", "α-G-CNN", "|G| = 1", "|G| = 8", "PCam accuracy (%)", "RotMNIST accuracy (%)"} <= set(
        paper
    )
    assert not {"ours", "paper"} & set(paper) and {"ours", "paper", "p12"} <= set(both)


def test_wrong_points_are_named():
    with pytest.raises(ValueError, match=re.escape("unknown family 'ViT'; choose G-CSA, G-SA, G-CNN, alpha-G-CNN")):
        BubblePoint("ViT", "p4", 90.0, 80.0, ours=True)
    with pytest.raises(ValueError, match="G-CSA p4: give the accuracy on RotMNIST, on PCam, or both"):
        BubblePoint("G-CSA", "p4", None, None, ours=True)
    with pytest.raises(ValueError, match="no models to draw: the list of points is empty"):
        draw_bubbles([], "unused.png")


def turn_by_hand(image, degrees):
    """Counter-clockwise about the centre, bilinear, zero outside: the definition, pixel by pixel."""
    size = len(image)
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turned = np.zeros_like(image)
    for row in range(size):
        for column in range(size):
            x, y = column - (size - 1) / 2, (size - 1) / 2 - row
            source_column, source_row = c * x + s * y + (size - 1) / 2, (size - 1) / 2 - (-s * x + c * y)
            for near_row in (math.floor(source_row), math.floor(source_row) + 1):
                for near_column in (math.floor(source_column), math.floor(source_column) + 1):
                    if 0 <= near_row < size and 0 <= near_column < size:
                        weight = (1 - abs(source_row - near_row)) * (1 - abs(source_column - near_column))
                        turned[row, column] += weight * image[near_row, near_column]
    return turned


def test_numbers_of_the_interpolation_figure(kept_figures):
    image = figures.turned_patterns()["image"].numpy()
    back = turn_by_hand(turn_by_hand(image, 45), -45)
    around = image
    for _ in range(8):
        around = turn_by_hand(around, 45)
    once = turn_by_hand(image, 45)
    mixed = np.sum((once > 1e-9) & (once < 1 - 1e-9))
    errors = [100 * np.abs(turned - image).sum() / image.sum() for turned in (back, around)]
    assert mixed > 10 and 20 < errors[0] < errors[1]
    draw_interpolation("unused.png")
    shown = [axes.get_xlabel() for axes in kept_figures[0].axes[:6]]
    expected = [
        "9 × 9 pixels",
        "0 mixed pixels",
        "error 0 %",
        f"{mixed} mixed pixels",
        f"error {errors[0]:.1f} %",
        f"error {errors[1]:.1f} %",
    ]
    assert shown == expected
    np.testing.assert_array_equal(figures.turned_patterns()["90°"], np.rot90(image))


def test_the_glyph_has_no_symmetry():
    glyph = draw_glyph(20)
    assert glyph.shape == (20, 20) and 0 <= glyph.min() < 0.01 and 0.99 > glyph.max() > 0.9
    for element in range(1, 8):
        assert (act_on_plane(glyph, "p4m", element) - glyph).abs().max() > 0.5


def test_lifted_maps_follow_the_definition():
    """Eq. 7 by sums: F(x, g) = sum over offsets d of f(x + d) k(g^-1 d), with d = (right, up)."""
    maps = glyph_maps()
    size, half = len(maps.image), maps.filters.shape[-1] // 2
    image = np.pad(maps.image.numpy(), half)
    kernel = maps.filters[0].numpy()
    for g in range(4):
        expected = np.zeros((size, size))
        for up in range(-half, half + 1):
            for right in range(-half, half + 1):
                x, y = right, up
                for _ in range(g):  # a quarter turn clockwise, the inverse of the element
                    x, y = y, -x
                expected += image[half - up :, half + right :][:size, :size] * kernel[half - y, half + x]
        np.testing.assert_allclose(maps.lifted[FIELD, g], expected, atol=1e-12)
    assert torch.allclose(maps.lifted.square().mean(), torch.tensor(1.0, dtype=torch.float64))


def test_attention_is_that_of_the_layer():
    """Eq. 10 for one query, against the fused attention of all of them (Eq. 9)."""
    maps = glyph_maps()
    weights = attention_weights(maps.q, maps.k, 0, QUERY)
    assert weights.shape == maps.q.shape[1:] and abs(weights.sum().item() - 1) < 1e-12
    flat = [x.flatten(2)[None, None] for x in (maps.q, maps.k, maps.v)]  # [B, N, C, G, P]
    expected = attend(*flat, attention="joint", num_heads=1)[0, 0, :, 0, QUERY[0] * maps.q.shape[-1] + QUERY[1]]
    found = torch.einsum("gyx,cgyx->c", weights, maps.v)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_words_of_the_diagrams(kept_figures):
    draw_architecture("unused.png")
    draw_projection("unused.png")
    architecture, projection = map(words, kept_figures)
    assert {"(a) network", "[1, 28, 28]", "[16]", "[10]", "× 3", "norm", "G-CSA", "MLP", "logits"} <= set(architecture)
    shares = [float(word.split("sum ")[1]) for word in architecture if ", sum " in word]
    assert len(shares) == 4 and abs(sum(shares) - 1) <= 0.02  # the weights of one query, by element
    assert {"$Q=W_Q*F$", "$K=W_K*F$", "$V=W_V*F$"} <= set(projection)
    assert any("each [8, 4, 20, 20]" in word for word in projection) and any("each [1600, 8]" in word for word in projection)
