"""`revit data pack`, and training on what it makes."""

import json
from pathlib import Path

import pytest

from revit.cli import main
from revit.cli.units import parse_bytes, show_bytes
from tests.cli.conftest import TINY, png_folder

TRAIN = ["train", "folder", "--data.name", "shards", "--data-root", "packed", *TINY]
SMALL = ["--model.stride", "2", "--model.neighbourhood", "global", "--augment.mixup", "0.2", "--train.epochs", "1"]


def test_pack_train_and_evaluate(tmp_path, capsys):
    png_folder(tmp_path / "images", (("cats", 24), ("dogs", 24)))
    assert main(["data", "pack", str(tmp_path / "images"), "--out", "packed", "--shard-size", "20.48kB"]) == 0
    printed = capsys.readouterr().out
    assert "train: 34 images in 4 archives" in printed and "--data.name shards --data-root packed" in printed
    assert main(["data", "shards", "--data-root", "packed", "--sheet", "sheet.png"]) == 0
    assert "3 x 8 x 8, 2 classes" in capsys.readouterr().out and Path("sheet.png").stat().st_size > 1000
    assert main([*TRAIN, *SMALL, "--out", "run"]) == 0
    assert main(["eval", "run"]) == 0
    scores, trained = (json.loads(Path(f"run/{name}.json").read_text()) for name in ("eval_test/scores", "test"))
    assert scores["images"] == 10 and scores["loss"] == trained["loss"]


def test_wrong_uses_are_one_line(tmp_path, fails):
    png_folder(tmp_path / "images")
    folder = tmp_path / "images"
    assert "--out is missing" in fails("data", "pack", folder)
    assert "FOLDER is missing" in fails("data", "pack", "--out", "x")
    assert "nowhere: no such folder; FOLDER holds the images" in fails("data", "pack", "nowhere", "--out", "x")
    assert "--shard-size: '256XB' is no amount of memory" in fails(
        "data", "pack", folder, "--out", "x", "--shard-size", "256XB"
    )
    assert "only folder and imagenet can be packed" in fails("data", "pack", folder, "--out", "x", "--data.name", "pcam")
    Path("x").write_text("a file")
    assert "x: a file; choose a new folder" in fails("data", "pack", folder, "--out", "x")
    assert "no .tar archives" in fails(*TRAIN[:4], "--data-root", folder, "--out", "y")


@pytest.mark.parametrize(
    ("text", "count"), [("24GB", 24e9), ("24 gib", 24 * 2**30), ("1.5kB", 1500), ("7B", 7), ("0.5TB", 5e11), ("80gb", 80e9)]
)
def test_amounts(text, count):
    assert parse_bytes(text, "--x") == count


@pytest.mark.parametrize("text", ["24", "GB", "24XB", "-1GB", "0GB", "1e3GB", "", "24GB!", "nan GB"])
def test_amounts_that_are_none(text):
    with pytest.raises(ValueError, match=r"--x: "):
        parse_bytes(text, "--x")


def test_amounts_are_shown_with_three_digits():
    assert [show_bytes(count) for count in (0, 999, 1234, 24e9, 1.5e12)] == ["0 B", "999 B", "1.23 kB", "24 GB", "1.5 TB"]
