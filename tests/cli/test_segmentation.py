"""From a folder of images and masks to a trained model, its scores, its masks for new images, its audit: by commands alone."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from revit.actions import act_on_plane
from revit.cli import main
from revit.cli.runs import load_run
from tests.data.shapes import shape_folder

TINY = [
    "--model.group", "p4", "--model.dims", "[6,8]", "--model.depths", "[1,1]", "--model.num_heads", "[1,1]",
    "--model.window_size", "4", "--augment.rotate", "90", "--augment.rotate_step", "90",
]  # fmt: skip


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """One run for all tests here: 64 pixels, a few epochs."""
    folder = tmp_path_factory.mktemp("segmented")
    root = shape_folder(folder / "data", 40, 64)
    (root / "classes.txt").write_text("ground\ndisc\nsquare\n")
    words = ["train", "segmentation", "--data-root", str(root), "--out", str(folder / "run"), *TINY]
    words += ["--train.epochs", "4", "--train.batch_size", "4", "--train.lr", "0.02", "--train.ema", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVIT_CACHE", str(folder / "cache"))
        assert main(words) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder / "run"


def test_it_learns_and_the_epoch_is_chosen_by_mean_iou(segmented):
    result = json.loads((segmented / "test.json").read_text())
    assert result["mean_iou"] > 0.75 and result["accuracy"] > 0.9  # the background alone: 0.29 and 0.86
    assert result["split"] == "test" and result["images"] == 8 and result["consistency_percent"] == 100
    rows = list(csv.DictReader((segmented / "results.csv").read_text().splitlines()))
    best = max(rows, key=lambda row: float(row["val_mean_iou"]))
    assert result["validation_mean_iou"] == pytest.approx(float(best["val_mean_iou"])) and len(rows) == 4
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    audit = json.loads((segmented / "audit.json").read_text())["audit"]
    assert audit["passed"] and audit["stages"]["logits"]["kind"] == "image"
    for name in ("confusion_matrix.png", "curves.png", "audit_polar.png"):
        assert (segmented / name).stat().st_size > 1000


def test_trained_masks_turn_with_the_image(segmented):
    model = load_run(segmented).model.double()
    x = torch.randn(1, 1, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = act_on_plane(model(x), "p4", 1)
        assert (model(act_on_plane(x, "p4", 1)) - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_eval_prints_and_writes_the_scores(segmented, capsys):
    assert main(["eval", str(segmented), "--split", "val", "--out", "scores"]) == 0
    said = capsys.readouterr().out
    assert "mean IoU" in said and "pixel accuracy" in said and "square" in said
    scores = json.loads(Path("scores/scores.json").read_text())
    assert [row["name"] for row in scores["per_class"]] == ["ground", "disc", "square"] and scores["images"] == 3


def test_predict_writes_masks_beside_the_table(segmented, capsys, fails):
    images = segmented.parent / "data" / "images"
    assert main(["predict", str(images), "--run", str(segmented), "--out", "table.csv", "--agreement"]) == 0
    rows = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert len(rows) == 40 and all(float(row["agreement"]) == 1 for row in rows)
    found = []
    for row in rows:
        mask = np.asarray(Image.open(row["mask"]))
        truth = np.asarray(Image.open(row["path"].replace("images", "masks")))
        assert mask.shape == (64, 64) and row["mask"].startswith("table_masks")
        found.append((mask == truth)[truth != 255].mean())
    assert np.mean(found) > 0.9
    assert "--embeddings are one row an image" in fails(
        "predict", images, "--run", segmented, "--out", "t.csv", "--embeddings", "e.npy"
    )


def test_the_audit_takes_the_run(segmented, capsys):
    few = ["--samples", "4", "--versions", "1", "--angle-images", "1", "--angle-step", "90", "--fail-above", "1e-4"]
    assert main(["audit", str(segmented), "--out", "audit", *few]) == 0
    assert "image" in capsys.readouterr().out and len(list(Path("audit").glob("*.png"))) >= 3


def test_data_describes_the_folder(segmented, capsys):
    assert main(["data", "masks", "--data-root", str(segmented.parent / "data"), "--sheet", "sheet.png", "--count", "4"]) == 0
    said = capsys.readouterr().out
    assert "1 x 64 x 64, 3 classes" in said and "largest class" not in said and Path("sheet.png").stat().st_size > 1000


def test_resume_of_a_finished_run_and_data_that_does_not_fit(segmented, npz, fails, capsys):
    capsys.readouterr()
    assert main(["train", str(segmented), "--resume"]) == 0
    assert "finished before: test accuracy" in capsys.readouterr().out
    data = segmented.parent / "data"
    assert "revit_tiny is for classification, masks for segmentation; choose a model with seg" in fails(
        "train", "segmentation", "--data-root", data, "--model.name", "revit_tiny", "--out", "no"
    )
    assert "revit_seg_tiny is for segmentation, arrays for classification" in fails(*npz[:-4], "--model.name", "revit_seg_tiny")
    assert "mixup and cutmix" in fails("train", "segmentation", "--data-root", data, "--augment.mixup", "0.2", "--out", "no")
    (data / "masks/3.png").rename(data / "masks/3.gone")
    try:
        assert "3.png: has no mask" in fails("train", "segmentation", "--data-root", data, "--out", "no")
    finally:
        (data / "masks/3.gone").rename(data / "masks/3.png")
