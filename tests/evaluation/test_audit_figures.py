"""What is drawn is what was measured: the numbers on the axes, the maps in the panels, the answers in the film."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from revit.actions import act_on_features, act_on_plane
from revit.evaluation import audit_figures
from revit.evaluation.audit import Audit, StageErrors
from revit.evaluation.audit_figures import (
    draw_attention,
    draw_errors_by_angle,
    draw_stage_errors,
    draw_turning_features,
    short_number,
    write_turning_gif,
)
from revit.evaluation.generalisation import Agreement, ByAngle
from revit.evaluation.visible import find_maps, one_element, turned_pixel, unusual_places
from revit.groups import Group
from revit.models import create_model
from tests.evaluation.models import OrbitMean, Plain

SMALL = {"dims": 4, "depths": 2, "num_heads": 1}


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they were saved, for a look at their contents; files are not written."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    return figures


def make_audit(stages, *, exact=(True, True, False), tolerance=1e-4):
    """An audit of p8-like elements from relative errors by stage; the largest error is three times the relative one."""
    errors = {
        name: StageErrors("image", values, values, tuple(3 * value for value in values), None, None)
        for name, values in stages.items()
    }
    names = ("0°", "90°", "45°")[: len(exact)]
    return Audit("p8", 10, names, exact, errors, tuple(errors), (1.0,) * len(exact), tolerance)


def picture_of(path):
    with Image.open(path) as image:
        return image.size, np.asarray(image.convert("L"))


def panels(figure):
    """The arrays in the panels of a figure, row by row, without colour bars."""
    axes = [a for a in figure.axes if a.get_subplotspec() is not None]
    shown = [np.asarray(a.images[0].get_array(), dtype=float) if a.images else None for a in axes]
    columns = axes[0].get_subplotspec().get_gridspec().ncols
    return [shown[i : i + columns] for i in range(0, len(shown), columns)]


def test_stage_errors_are_those_of_the_audit(drawn, tmp_path):
    audit = make_audit({"lift": (0.0, 1e-7, 0.03), "block": (0.0, 1e-2, 0.2), "logits": (0.0, 0.0, math.inf)})
    assert audit.broken_stage() == "block"
    draw_stage_errors(audit, tmp_path / "x.png")
    axes = drawn[0].axes[0]
    low, high = axes.get_ylim()
    by_label = {line.get_label(): line for line in axes.lines}
    assert axes.get_yscale() == "log"
    assert by_label["one exact element"].get_ydata().tolist() == [1e-7, 1e-2, low]  # 0 on the lower edge
    assert by_label["one interpolated element"].get_ydata().tolist() == [0.03, 0.2, high]
    assert by_label["one exact element"].get_marker() != by_label["one interpolated element"].get_marker()
    assert by_label["one exact element"].get_color() != by_label["one interpolated element"].get_color()
    assert by_label["mean, exact elements"].get_ydata().tolist() == [1e-7, 1e-2, low]
    assert by_label["largest difference, exact elements"].get_ydata().tolist() == pytest.approx([3e-7, 3e-2, low])
    assert by_label["tolerance 0.0001"].get_ydata() == [1e-4, 1e-4] and by_label["tolerance 0.0001"].get_linestyle() == "--"
    (band,) = axes.patches
    assert band.get_label() == "first broken stage" and 0 < band.get_x() < 1 < band.get_x() + band.get_width() < 2
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[-2:] == ["0", "∞"] and low < 1e-7 and high > 0.2
    assert [text.get_text() for text in axes.get_xticklabels()] == ["lift", "block", "logits"]
    assert "first broken stage: block" in axes.get_title("left")


@pytest.mark.parametrize("count", [1, 7, 200])
def test_stage_labels_are_thinned_out_and_the_broken_one_stays(count, drawn, tmp_path):
    names = [f"layer{i}.conv" for i in range(count)]
    broken = names[min(count - 1, 77)]
    audit = make_audit({name: (0.0, float(name == broken), 0.1) for name in names})
    draw_stage_errors(audit, tmp_path / "x.png")
    axes = drawn[0].axes[0]
    labels = axes.get_xticklabels()
    shown = [text.get_text() for text in labels]
    assert len(shown) <= 34 and {broken, names[-1]} <= set(shown) and (count > 32 or shown == names)
    assert [names[int(place)] for place in axes.get_xticks()] == shown
    assert [text.get_text() for text in labels if text.get_fontweight() == "bold"] == [broken]
    assert np.diff(axes.get_xticks()).min(initial=99) >= math.ceil(count / 32)


@pytest.mark.parametrize("exact", [(True,), (True, True), (True, False)])
def test_stage_errors_of_any_group(exact, tmp_path):
    """The trivial group, exact elements alone, interpolated ones alone; nothing but zeros, not a number."""
    audit = make_audit({"$a_b$": (0.0, 0.0)[: len(exact)], "b": (0.0, math.nan)[: len(exact)]}, exact=exact)
    draw_stage_errors(audit, tmp_path / "x.png")
    size, pixels = picture_of(tmp_path / "x.png")
    assert 1000 < size[0] < 175 / 25.4 * 200 and pixels.std() > 5


def test_stage_errors_against_another_tolerance(drawn, tmp_path):
    draw_stage_errors(make_audit({"a": (0.0, 1e-7, 0.1)}), tmp_path / "x.png", tolerance=1e-8)
    assert "first broken stage: a" in drawn[0].axes[0].get_title("left")
    draw_stage_errors(make_audit({"a": (0.0, 0.0, 0.0)}), tmp_path / "x.png", tolerance=0.0)
    assert "broken" not in drawn[1].axes[0].get_title("left")


def test_errors_by_angle(drawn, tmp_path):
    frame = tuple(Agreement(100 - i, 0.1, 0.2 + i, 0.3 + i) for i in range(4))
    disc = tuple(Agreement(90 - i, 0.1, 1.2 + i, 2.3 + i) for i in range(4))
    by_angle = ByAngle(12, (0.0, 90.0, 180.0, 270.0), frame, disc)
    expected = {
        "logit_error": ([0.3, 1.3, 2.3, 3.3], [2.3, 3.3, 4.3, 5.3]),
        "top_class_difference": ([0.2, 1.2, 2.2, 3.2], [1.2, 2.2, 3.2, 4.2]),
        "changed_percent": ([0, 1, 2, 3], [10, 11, 12, 13]),
    }
    for measure, values in expected.items():
        draw_errors_by_angle(by_angle, tmp_path / "x.png", measure=measure)
        lines = drawn[-1].axes[0].lines
        assert [line.get_label() for line in lines] == ["full frame", "central disc only"]
        for line, wanted in zip(lines, values, strict=True):
            assert line.get_ydata()[:4].tolist() == pytest.approx(wanted)
        assert "12 images" in drawn[-1].axes[0].get_title()
    with pytest.raises(ValueError) as error:
        draw_errors_by_angle(by_angle, tmp_path / "x.png", measure="loss")
    assert str(error.value) == "unknown measure 'loss'; choose logit_error, top_class_difference, changed_percent"


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_rows_of_features_are_the_first_row_turned(group, drawn, tmp_path):
    """One field at every element: row g is T_g of row 0, elements traded, and the difference is rounding."""
    model = create_model("revit_tiny", group=group, in_chans=1, **SMALL).double()
    x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    assert draw_turning_features(model, x, group, tmp_path / "x.png", fill=0.0) is True
    order, elements = Group.parse(group).order, {"p4": [0, 1, 2, 3], "p4m": [0, 1, 2, 4, 5]}[group]
    rows = panels(drawn[0])
    first = torch.from_numpy(np.stack(rows[0][1:-1]))
    assert first.shape[0] == order and float(first.std()) > 0
    maps = model.eval().named_features(x)["pre_class"][0].detach()
    field = maps.flatten(1).var(1).argmax()
    torch.testing.assert_close(first, maps[field], rtol=0, atol=1e-5)
    for g, row in zip(elements, rows, strict=True):
        pixels = (x[0, 0] - x.min()) / (x.max() - x.min())
        torch.testing.assert_close(torch.from_numpy(row[0]), act_on_plane(pixels, group, g), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(np.stack(row[1:-1])), act_on_features(first, group, g), rtol=0, atol=1e-5)
        assert row[-1].max() < 1e-3  # percent


def test_features_of_a_plain_network(drawn, tmp_path):
    """Its channels that vary most, and the relative error as the audit would print it."""
    model, x = Plain(classes=6).double(), torch.randn(1, 1, 10, 10, dtype=torch.float64)
    assert draw_turning_features(model, x, "p4", tmp_path / "x.png", fill=0.0)
    maps = model.conv(x).detach()
    best = maps[0].flatten(1).var(1).argsort(descending=True)[:4]
    row = panels(drawn[0])[1]
    torch.testing.assert_close(torch.from_numpy(np.stack(panels(drawn[0])[0][1:-1])), maps[0, best], rtol=0, atol=1e-5)
    difference = model.conv(torch.rot90(x, 1, (-2, -1))).detach() - torch.rot90(maps, 1, (-2, -1))
    relative = float(difference.abs().mean() / maps.abs().mean())
    assert row[-1].mean() == pytest.approx(100 * relative, rel=1e-4) and relative > 0.01
    titles = [axes.get_title("center") for axes in drawn[0].axes]
    assert f"error {relative:.3g}" in titles and f"channel {best[0]}" in titles and "difference\nerror 0" in titles


def test_stacked_channels_are_read_as_elements():
    """Maps [1, C*G, H, W] of an equivariant layer turn only when their channels trade places."""
    group = Group.parse("p4")
    features = torch.randn(1, 3, 4, 5, 5)
    stages = {g: {"out": act_on_features(features, group, g).flatten(1, 2)} for g in range(4)}
    assert find_maps(stages, group).stacked == 4
    image = torch.randn(1, 12, 5, 5)
    assert find_maps({g: {"out": act_on_plane(image, group, g)} for g in range(4)}, group).stacked == 0
    assert find_maps({0: {"out": torch.randn(1, 3, 8, 5, 5)}}, group).pooled  # a map on another group
    assert find_maps({0: {"out": torch.randn(1, 3), "one": torch.randn(1, 3, 1, 1)}}, group) is None


@pytest.mark.parametrize(
    ("name", "group", "shape"),
    [
        ("p4m", "p4m", (3, 12, 16)),
        ("z2", "p4m", (5, 16, 12)),
        ("p3", "p3", (2, 12, 12)),
        ("p12", "p12", (3, 12, 12)),
        ("plain", "p4m", (5, 12, 16)),
        ("plain", "z2", (1, 12, 12)),
    ],
)
def test_pictures_of_any_model_image_and_group(name, group, shape, tmp_path):
    """Grey, two, three and five channels, square or not; a model on the group, on another, on none, and a plain one."""
    x, names = 3 + 2 * torch.randn(1, *shape), [f"no {i}" for i in range(10)]
    model = Plain(shape[0]) if name == "plain" else create_model("revit_tiny", group=name, in_chans=shape[0], **SMALL)
    model, fill = model.train(), [-1.0] * shape[0]
    assert draw_turning_features(model, x, group, tmp_path / "features.png", fill=fill)
    write_turning_gif(model, x, tmp_path / "film.gif", fill=fill, group=group, classes=names)
    assert draw_attention(model, x, group, tmp_path / "attention.png", fill=fill) is (name != "plain")
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    for file in tmp_path.iterdir():
        size, pixels = picture_of(file)
        assert 100 < size[0] <= 175 / 25.4 * 200 and pixels.std() > 5
    assert len(list(tmp_path.iterdir())) == (2 if name == "plain" else 3)


def test_the_film(monkeypatch, tmp_path):
    """24 frames of 15 degrees that repeat for ever; answers as asked of the model, changes said."""
    texts = []
    draw = audit_figures._frame
    monkeypatch.setattr(audit_figures, "_frame", lambda *parts: texts.append(parts[1:]) or draw(*parts))
    model, x = Plain().double(), 4 * torch.randn(1, 1, 10, 10, dtype=torch.float64)
    write_turning_gif(model, x, tmp_path / "film.gif", fill=0.0, group="p4", classes=["a", "b", "<c>", "d\nd"])
    with Image.open(tmp_path / "film.gif") as film:
        assert film.format == "GIF" and film.n_frames == 24 and film.info["loop"] == 0 and film.info["duration"] == 160
    assert (tmp_path / "film.gif").stat().st_size < 300_000
    assert [angle for angle, _, _ in texts] == [f"{15 * i}°" for i in range(24)]
    model.requires_grad_(False)
    upright = int(model(x).argmax())
    for quarter in range(4):
        chances = model(torch.rot90(x, quarter, (-2, -1))).softmax(1)[0]
        top = int(chances.argmax())
        _, answer, chance = texts[6 * quarter]
        assert answer == ["a", "b", "<c>", "d d"][top] + (" (changed)" if top != upright else "")
        assert chance == pytest.approx(float(chances[top]), abs=1e-12)


def test_the_film_of_a_model_without_maps(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    x = torch.rand(1, 1, 8, 8)
    write_turning_gif(model, x, tmp_path / "film.gif", fill=0.0, group="p4")
    assert draw_turning_features(model, x, "p4", tmp_path / "features.png", fill=0.0) is False
    assert [file.name for file in tmp_path.iterdir()] == ["film.gif"]


def test_attention_turns_and_the_picture_says_so(drawn, tmp_path):
    model = create_model("revit_tiny", group="p4m", in_chans=1, **SMALL).double()
    x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    assert draw_attention(model, x, "p4m", tmp_path / "x.png", fill=0.0) is True
    rows = panels(drawn[0])
    assert len(rows) == 3 and len(rows[0]) == 7
    for row in rows:
        for before, after, difference in (row[1:4], row[4:7]):
            assert before.sum() == pytest.approx(1, abs=1e-5) and before.std() > 0
            np.testing.assert_allclose(np.rot90(before), after, rtol=0, atol=1e-6)
            assert np.abs(difference).max() < 1e-6
    # The ring of the first panel: the pixel that was asked.
    ring = drawn[0].axes[1].lines[0]
    query = int(ring.get_ydata()[0]), int(ring.get_xdata()[0])
    layer = model.eval().stages[0].blocks[0]
    features = layer.norm1(model.named_features(x)["lift"])
    expected = layer.attn.attention_map(features, *query)[0].detach()
    np.testing.assert_allclose(rows[0][1], expected, rtol=0, atol=1e-6)


def test_attention_that_does_not_turn_is_seen(drawn, tmp_path):
    model = create_model("revit_tiny", group="p4m", in_chans=1, **SMALL)
    model.stem.register_forward_hook(lambda _m, _x, out: out + torch.arange(out.shape[-1]).to(out))  # a position encoding
    assert draw_attention(model, torch.randn(1, 1, 12, 12), "p4m", tmp_path / "x.png", fill=0.0)
    differences = [np.abs(part).max() for row in panels(drawn[0]) for part in (row[3], row[6])]
    assert min(differences) > 1e-4
    assert f"up to {short_number(float(differences[2]))}" in [axes.get_title("center") for axes in drawn[0].axes]


def test_no_attention_no_picture(tmp_path):
    assert draw_attention(OrbitMean(Plain()), torch.rand(1, 1, 8, 8), "p4", tmp_path / "x.png", fill=0.0) is False
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("group", "element"), [("z2", 0), ("z2m", 1), ("p2", 1), ("p3", 1), ("p4m", 1), ("p8", 2), ("p6m", 3)])
def test_the_element_of_the_attention_picture(group, element):
    assert one_element(Group.parse(group)) == element


def test_pixels_move_with_the_plane():
    group, places = Group.parse("p4m"), torch.arange(15.0).view(3, 5)
    for g in range(8):
        for row in range(3):
            assert act_on_plane(places, group, g)[turned_pixel((row, 1), (3, 5), group, g)] == places[row, 1]


def test_queries_are_on_what_is_unusual_and_apart():
    image = torch.zeros(1, 3, 12, 12)
    image[0, :, 1, 1], image[0, :, 1, 2], image[0, :, 9, 9], image[0, :, 2, 10] = 9, 8, 7, 6
    places = unusual_places(image, (12, 12), 3, inside=False)
    assert [(int(12 * row), int(12 * column)) for row, column in places] == [(1, 1), (9, 9), (2, 10)]
    assert len(unusual_places(image, (1, 2), 3, inside=False)) == 2
    inside = unusual_places(image, (12, 12), 1, inside=True)
    assert abs(inside[0][0] - 0.5) ** 2 + abs(inside[0][1] - 0.5) ** 2 <= 0.16


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 8, 8)])
def test_one_image_is_asked_for(shape, tmp_path):
    for call in (draw_attention, draw_turning_features):
        with pytest.raises(ValueError) as error:
            call(Plain(), torch.rand(shape), "p4", tmp_path / "x.png", fill=0.0)
        assert str(error.value) == f"expected one image [1, C, H, W], got shape {list(shape)}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1234, "0.123"), (1.23e-7, "1.2e-07"), (12345.0, "1.2e+04"), (math.inf, "∞"), (math.nan, "not a number")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text
