"""Scores of masks from definitions, losses with pixels that do not count, masks written in the frame of their images."""

import csv

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from revit.data import DataOptions, DataSpec, open_dataset
from revit.data.loader import EvalLoader
from revit.evaluation.predict_masks import framed, write_masks
from revit.evaluation.segmentation import MaskOutputs, collect_masks, count_pixels, join_masks, mean_iou, score_masks
from revit.evaluation.tasks import task_of
from tests.data.shapes import shape_folder

SPEC = DataSpec("masks", 1, (8, 8), ("ground", "disc", "square"), (0.5,), (0.25,), "here", task="segmentation")
GENERATOR = torch.Generator().manual_seed(0)


def some_masks(*shape):
    truth = torch.randint(0, 3, shape, generator=GENERATOR)
    truth[torch.rand(shape, generator=GENERATOR) < 0.2] = 255
    return truth


def test_pixels_are_counted_and_scored_by_definition():
    truth, predicted = some_masks(4, 6, 5), torch.randint(0, 3, (4, 6, 5), generator=GENERATOR)
    matrix = count_pixels(predicted, truth, 3)
    for i in range(3):
        for j in range(3):
            assert matrix[i, j] == ((truth == i) & (predicted == j)).sum()
    scores = score_masks(MaskOutputs(matrix, 12.0, np.arange(4)), SPEC.classes)
    counted = truth != 255
    assert scores.pixels == counted.sum() and scores.loss == pytest.approx(12.0 / scores.pixels)
    assert scores.accuracy == pytest.approx((truth == predicted)[counted].double().mean().item())
    for k, row in enumerate(scores.per_class):
        both = ((truth == k) & (predicted == k) & counted).sum().item()
        either = (((truth == k) | (predicted == k)) & counted).sum().item()
        assert row.iou == pytest.approx(both / either) and row.support == (truth == k).sum()
        assert row.precision == pytest.approx(both / ((predicted == k) & counted).sum().item())
        assert row.recall == pytest.approx(both / row.support)
    assert scores.mean_iou == pytest.approx(np.mean([row.iou for row in scores.per_class])) == mean_iou(matrix)
    assert scores.to_dict()["confusion"] == tuple(map(tuple, matrix.tolist()))


def test_classes_that_are_nowhere_do_not_count():
    matrix = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    scores = score_masks(MaskOutputs(matrix, 1.0, np.arange(1)), SPEC.classes)
    assert scores.mean_iou == pytest.approx((3 / 4 + 4 / 5) / 2) and scores.per_class[2].iou is None
    with pytest.raises(ValueError, match="no pixel to score"):
        score_masks(MaskOutputs(torch.zeros(3, 3, dtype=torch.int64), 0.0, np.arange(1)), SPEC.classes)
    with pytest.raises(ValueError, match="2 classes need a matrix"):
        score_masks(MaskOutputs(matrix, 1.0, np.arange(1)), ("a", "b"))


def test_losses_are_means_over_the_pixels_that_count():
    task, logits, truth = task_of(SPEC), torch.randn(3, 3, 4, 5, dtype=torch.float64, generator=GENERATOR), some_masks(3, 4, 5)
    truth[2] = 255  # an image without a label
    losses, right = task.losses(logits, truth, label_smoothing=0.0), task.right(logits, truth)
    for i in range(2):
        counted = truth[i] != 255
        shares = logits[i].log_softmax(0)
        expected = [-shares[truth[i, y, x], y, x] for y, x in counted.nonzero().tolist()]
        assert losses[i].item() == pytest.approx(np.mean(expected), abs=1e-12)
        assert right[i].item() == pytest.approx((logits[i].argmax(0) == truth[i])[counted].double().mean().item())
    assert losses[2] == right[2] == 0
    smooth = task.losses(logits, truth, label_smoothing=0.1)
    assert torch.isfinite(smooth).all() and smooth[0] != losses[0]


class Threshold(nn.Module):
    """Bright pixels are discs, dark ones squares."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * torch.cat((0 * x + 0.55, x, -x), dim=1)


def test_a_split_is_collected_in_shares(tmp_path):
    """Sums of a whole split, those of its two halves, and validation measures from them are the same."""
    dataset = open_dataset(DataOptions(name="masks", root=str(shape_folder(tmp_path, 12))))
    model, cpu = Threshold(), torch.device("cpu")
    loader = EvalLoader(dataset.train, dataset.spec, batch_size=4)
    outputs = collect_masks(model, loader, cpu)
    x, truth = next(iter(EvalLoader(dataset.train, dataset.spec, batch_size=99))), None
    logits, truth = model(loader.prepare(x, cpu, torch.float32)), x.labels
    assert outputs.loss == pytest.approx(F.cross_entropy(logits, truth, ignore_index=255, reduction="sum").item(), rel=1e-5)
    assert torch.equal(outputs.confusion, count_pixels(logits.argmax(1), truth, 3))
    half = torch.div(outputs.confusion, 2, rounding_mode="floor")
    parts = [
        MaskOutputs(half, outputs.loss / 2, np.arange(4)),
        MaskOutputs(outputs.confusion - half, outputs.loss / 2, np.arange(4, 9)),
    ]
    joined, task = join_masks(parts), task_of(SPEC)
    assert torch.equal(joined.confusion, outputs.confusion) and len(joined.samples) == 9
    measures, scores = task.measures(sum(task.sums(part) for part in parts)), score_masks(outputs, SPEC.classes)
    assert measures == pytest.approx({"loss": scores.loss, "accuracy": scores.accuracy, "mean_iou": scores.mean_iou})
    with pytest.raises(ValueError, match="evaluated by two processes"):
        join_masks([parts[0], parts[0]])


def test_masks_are_written_in_the_frame_of_their_images(tmp_path):
    """Twice as tall: the model sees the centre, resized; the mask has the size of the image, and 255 outside."""
    pixels = np.full((32, 16), 128, np.uint8)
    pixels[8:16] = 255
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "tall.png", tmp_path / "a" / "tall.png"]
    for path in paths:
        Image.fromarray(pixels).save(path)
    written = write_masks(Threshold(), SPEC, paths, tmp_path / "table.csv", agreement="p4")
    assert written.rows == 2 and written.skipped == 0
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [row["mask"] for row in rows] == [str(tmp_path / "table_masks" / name) for name in ("tall.png", "tall-2.png")]
    assert float(rows[0]["share_disc"]) == 0.5 and float(rows[0]["agreement"]) == 1 and rows[1]["path"] == str(paths[1])
    for row in rows:
        image = Image.open(row["mask"])
        assert image.mode == "L" and image.size == (16, 32)
        mask = np.asarray(image)
        assert (mask[:8] == 255).all() and (mask[24:] == 255).all()
        assert (mask[8:16] == 1).all() and (mask[16:24] == 0).all()
    assert framed(np.zeros((4, 4), np.uint8), paths[0]).shape == (32, 16)
    (tmp_path / "bad.png").write_bytes(b"")
    skipped = write_masks(Threshold(), SPEC, [tmp_path / "bad.png", *paths], tmp_path / "table.csv", on_bad="skip")
    assert (skipped.rows, skipped.skipped) == (2, 1) and "empty" in skipped.skipped_list.read_text()
    with pytest.raises(ValueError, match=r"3 classes, the model returns shape \[2, 1, 8, 8\]"):
        write_masks(nn.Conv2d(1, 1, 1), SPEC, paths, tmp_path / "other.csv")
