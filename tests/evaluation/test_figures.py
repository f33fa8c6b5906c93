"""Pictures are whole, of printable size, and say what they should: SVG files hold their words as text."""

import html
import math
import re

import numpy as np
import pytest
import torch

from revit.evaluation import (
    CalibrationBin,
    draw_calibration,
    draw_confusion,
    draw_curves,
    draw_polar,
    draw_sheet,
    score_predictions,
)

ROWS = [
    {"epoch": str(e), "train_loss": f"{2 / e}", "val_loss": f"{3 / e}", "train_accuracy": f"{1 - 1 / e}", "lr": "0.001"}
    | {"val_accuracy": ["0.5", "0.958", "0.9", ""][e - 1]}
    for e in range(1, 5)
]
PAGE_WIDTH = 175 / 25.4 * 200  # pixels


def words(path):
    """The texts of an SVG file."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


def check_png(path):
    from PIL import Image

    with Image.open(path) as image:
        assert image.format == "PNG" and 60 < image.width <= PAGE_WIDTH
        pixels = np.asarray(image.convert("L"))
    assert pixels.std() > 5  # something is drawn
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_curves(tmp_path):
    draw_curves(ROWS, tmp_path / "curves.png")
    check_png(tmp_path / "curves.png")
    draw_curves(ROWS, tmp_path / "curves.svg")
    found = words(tmp_path / "curves.svg")
    assert "highest: 95.8 % (epoch 2)" in found and "step size (× 10⁻³)" in found
    assert {"Loss", "Accuracy", "Learning rate", "training", "validation", "correct (%)"} <= set(found)
    assert found.count("epoch") == 3


@pytest.mark.parametrize("rows", [ROWS[:1], [{"epoch": e, "train_loss": math.nan, "lr": 0} for e in range(40)]])
def test_curves_of_little(rows, tmp_path):
    draw_curves(rows, tmp_path / "curves.png")
    check_png(tmp_path / "curves.png")


@pytest.mark.parametrize("size", [2, 20, 1000])
def test_confusion_of_any_size(size, tmp_path):
    matrix = 9 * np.eye(size, dtype=int) + np.roll(np.eye(size, dtype=int), 1, axis=1)
    matrix[1] = 0  # a class without samples
    draw_confusion(matrix, [f"class {k}" for k in range(size)], tmp_path / "confusion.png")
    check_png(tmp_path / "confusion.png")


def test_confusion_shows_counts_and_shares_of_rows(tmp_path):
    draw_confusion([[998, 2], [1, 3]], ["$cat$", "a_dog"], tmp_path / "confusion.svg")
    found = words(tmp_path / "confusion.svg")
    assert {"998", "100 %", "2", "<1 %", "1", "25 %", "3", "75 %"} <= set(found)
    assert found.count("$cat$") == 2 and found.count("a_dog") == 2
    assert {"true class", "predicted class", "share of the true class (%)"} <= set(found)


def test_confusion_of_many_classes_thins_names_and_keeps_single_errors_visible(tmp_path):
    matrix = np.zeros((1000, 1000), dtype=int)
    matrix[3, 700] = 5
    draw_confusion(matrix, [f"n{k}" for k in range(1000)], tmp_path / "confusion.svg")
    found = words(tmp_path / "confusion.svg")
    assert sum(text.startswith("n") for text in found) == 80 and "n975" in found and "n3" not in found
    assert "1000 classes; a cell shows the largest share among 4 x 4" in found


def test_calibration(tmp_path):
    logits = 3 * torch.randn(300, 4)
    scores = score_predictions(logits, torch.randint(0, 4, (300,)))
    draw_calibration(scores.calibration, tmp_path / "calibration.png")
    check_png(tmp_path / "calibration.png")
    bins = (CalibrationBin(0.0, 0.5, 0, None, None), CalibrationBin(0.5, 1.0, 4, 0.75, 0.5))
    draw_calibration(bins, tmp_path / "calibration.svg")
    found = words(tmp_path / "calibration.svg")
    assert "Expected calibration error 25.0 %" in found and {"confidence (%)", "correct (%)", "predictions"} <= set(found)


def test_polar(tmp_path):
    angles = list(range(0, 360, 15))
    draw_polar(angles, {"a": [1] * 24, "b": [0.5] * 24}, tmp_path / "polar.png", title="Consistency", limit=1)
    check_png(tmp_path / "polar.png")
    draw_polar([0, 90], {"zero": [0, 0], "unknown": [math.nan, math.nan]}, tmp_path / "polar.svg", title="Error")
    assert {"zero", "unknown", "Error", "0°", "90°"} <= set(words(tmp_path / "polar.svg"))


def test_polar_closes_full_circles_only(tmp_path, monkeypatch):
    """The curve of angles all around ends where it began; an arc stays open."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self.axes[0].lines[0].get_ydata().tolist()))
    draw_polar([270, 0, 90, 180], {"a": [4, 1, 2, 3]}, tmp_path / "x.png")
    draw_polar([0, 30, 60, 90], {"a": [1, 2, 3, 4]}, tmp_path / "x.png")
    assert drawn == [[1, 2, 3, 4, 1], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("channels", "heading"),
    [(1, None), (2, "mean of 2 channels"), (3, None), (7, "channels 1 to 3 of 7 as red, green, blue")],
)
def test_sheet(channels, heading, tmp_path):
    images = np.random.default_rng(0).random((5, channels, 8, 12))
    draw_sheet(images, [f"no {i}" for i in range(5)], tmp_path / "sheet.svg")
    found = words(tmp_path / "sheet.svg")
    assert [text for text in found if text.startswith("no")] == [f"no {i}" for i in range(5)]
    assert heading in found if heading else len(found) == 5


@pytest.mark.parametrize("channels", [1, 3])
def test_sheet_shows_the_pixels(channels, tmp_path):
    from PIL import Image

    pixels = np.zeros((2, channels, 1, 2))
    pixels[1, 0] = 1  # the second image is white, or red
    draw_sheet(pixels, ["black", "bright"], tmp_path / "sheet.png")
    check_png(tmp_path / "sheet.png")
    shown = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    row = shown[int(0.7 * len(shown))]
    assert row[len(row) // 4].tolist() == [0, 0, 0]
    assert row[3 * len(row) // 4].tolist() == ([255, 255, 255] if channels == 1 else [255, 0, 0])


def test_names_of_any_kind(tmp_path):
    """Letters that no font has, broken encodings, line breaks and signs of formulas neither warn nor stop."""
    names = ["日本語", "caf\udce9", "a\nb", "$\\frac{1$", "x" * 300]
    draw_confusion(np.eye(5, dtype=int), names, tmp_path / "confusion.png")
    draw_sheet(torch.rand(5, 1, 4, 4), names, tmp_path / "sheet.svg")
    found = words(tmp_path / "sheet.svg")
    assert "a b" in found and "caf?" in found and "$\\frac{1$" in found and max(map(len, found)) < 30


def test_an_older_picture_survives_a_failure(tmp_path):
    path = tmp_path / "polar.png"
    draw_polar([0], {"a": [1]}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="series 'b' has 1 values for 2 angles"):
        draw_polar([0, 90], {"a": [1, 2], "b": [1]}, path)
    with pytest.raises(ValueError, match="xyz"):
        draw_polar([0], {"a": [1]}, tmp_path / "polar.xyz")
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["polar.png"]


def test_settings_of_the_user_do_not_matter_and_stay(tmp_path):
    import matplotlib

    draw_polar([0, 90], {"a": [1, 2]}, tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        draw_polar([0, 90], {"a": [1, 2]}, tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda path: draw_curves([], path), "no epochs to draw"),
        (lambda path: draw_confusion([[1, 2]], ["a", "b"], path), r"2 classes need a matrix of 2 x 2, got shape \[1, 2\]"),
        (lambda path: draw_calibration([CalibrationBin(0, 1, 0, None, None)], path), "all calibration bins are empty"),
        (lambda path: draw_polar([], {"a": []}, path), "at least one angle and one series"),
        (
            lambda path: draw_sheet(np.zeros((101, 1, 2, 2)), [""] * 101, path),
            r"1 to 100 images .* got \[101, 1, 2, 2\] and 101",
        ),
        (lambda path: draw_sheet(np.zeros((2, 1, 2, 2)), [""], path), "with a title each"),
    ],
)
def test_messages(draw, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
