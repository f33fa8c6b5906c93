"""Scores against their definitions, written out with loops."""

import json
import math

import pytest
import torch

from revit.evaluation import score_predictions

PROBABILITIES = [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [0.6, 0.3, 0.1]]
LABELS = [0, 1, 1, 2, 2, 0]


def area_by_pairs(scores, positive):
    """The share of (positive, negative) pairs that are ranked rightly; ties count half."""
    ups = [score for score, is_positive in zip(scores, positive, strict=True) if is_positive]
    downs = [score for score, is_positive in zip(scores, positive, strict=True) if not is_positive]
    pairs = [(p, n) for p in ups for n in downs]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


def calibration_by_loops(rows, labels):
    bins = {}
    for row, label in zip(rows, labels, strict=True):
        confidence = max(row)
        bins.setdefault(min(int(confidence * 15), 14), []).append((confidence, row.index(confidence) == label))
    gaps = [abs(sum(c for c, _ in members) - sum(right for _, right in members)) for members in bins.values()]
    return sum(gaps) / len(rows)


def test_a_case_by_hand():
    scores = score_predictions(torch.tensor(PROBABILITIES), torch.tensor(LABELS), ["a", "b", "c"], probabilities=True)
    assert scores.samples == 6
    assert scores.confusion == ((2, 0, 0), (1, 1, 0), (0, 0, 2))
    assert scores.accuracy == pytest.approx(5 / 6)
    assert scores.balanced_accuracy == pytest.approx((1 + 1 / 2 + 1) / 3)
    a, b, c = scores.per_class
    assert (a.name, a.support, a.precision, a.recall, a.f1) == ("a", 2, pytest.approx(2 / 3), 1, pytest.approx(0.8))
    assert (b.support, b.precision, b.recall, b.f1) == (2, 1, 0.5, pytest.approx(2 / 3))
    assert (c.support, c.precision, c.recall, c.f1, c.auroc) == (2, 1, 1, 1, 1)
    assert b.auroc == pytest.approx((4 + 2 + 1) / 8)  # 0.8 beats four; 0.3 beats 0.2 and 0.05 and ties with two
    assert scores.loss == pytest.approx(-sum(math.log(p) for p in (0.7, 0.3, 0.8, 0.4, 0.9, 0.6)) / 6)
    assert scores.calibration_error == pytest.approx((0.3 + 0.5 + 0.2 + 0.6 + 0.1 + 0.4) / 6, abs=1e-6)
    filled = {i: b for i, b in enumerate(scores.calibration) if b.count}
    assert list(filled) == [6, 7, 9, 10, 12, 13]
    assert filled[7].confidence == pytest.approx(0.5) and filled[7].accuracy == 0 and filled[7].low == pytest.approx(7 / 15)


@pytest.mark.parametrize("classes", [2, 5])
def test_random_cases_by_loops_and_by_torchmetrics(classes):
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    logits = 3 * torch.randn(200, classes)
    labels = torch.randint(0, classes, (200,))
    scores = score_predictions(logits, labels)
    rows = logits.double().softmax(1).tolist()
    assert scores.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert scores.calibration_error == pytest.approx(calibration_by_loops(rows, labels.tolist()), rel=1e-9)
    areas = [area_by_pairs([row[k] for row in rows], (labels == k).tolist()) for k in range(classes)]
    assert [row.auroc for row in scores.per_class] == pytest.approx(areas, rel=1e-5)
    assert scores.auroc == pytest.approx(areas[1] if classes == 2 else sum(areas) / classes, rel=1e-5)
    options = {"num_classes": classes}
    assert scores.accuracy == pytest.approx(multiclass_accuracy(logits, labels, average="micro", **options).item())
    assert scores.balanced_accuracy == pytest.approx(multiclass_accuracy(logits, labels, average="macro", **options).item())
    reference = multiclass_calibration_error(logits.softmax(1), labels, n_bins=15, norm="l1", **options)
    assert scores.calibration_error == pytest.approx(reference.item(), abs=1e-5)


def test_one_sample():
    scores = score_predictions(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
    assert (scores.accuracy, scores.balanced_accuracy, scores.auroc) == (1, 1, None)
    assert scores.per_class[0].recall is None and scores.per_class[0].precision is None and scores.per_class[0].f1 is None
    assert sum(b.count for b in scores.calibration) == 1


def test_a_class_without_samples():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
    scores = score_predictions(logits, torch.tensor([0, 0, 1]))
    absent = scores.per_class[2]
    assert (absent.support, absent.recall, absent.precision, absent.f1, absent.auroc) == (0, None, 0, 0, None)
    assert scores.auroc is None and scores.per_class[0].auroc is not None
    assert scores.balanced_accuracy == pytest.approx((0.5 + 1) / 2)  # of the two classes that are there


def test_all_predictions_one_class():
    scores = score_predictions(torch.tensor([[5.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 1, 1]))
    assert scores.confusion == ((2, 0), (2, 0))
    assert (scores.accuracy, scores.balanced_accuracy, scores.auroc) == (0.5, 0.5, 0.5)
    assert scores.per_class[1].precision is None and scores.per_class[1].recall == 0 and scores.per_class[1].f1 == 0


def test_confident_predictions_keep_their_ranking_and_a_finite_loss():
    logits = torch.tensor([[0.0, 30.0], [0.0, 25.0], [0.0, 20.0], [0.0, -20.0]])  # float32 would make the first three equal
    assert score_predictions(logits, torch.tensor([1, 0, 0, 0])).auroc == 1
    impossible = score_predictions(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1]), probabilities=True)
    assert math.isfinite(impossible.loss) and impossible.loss > 100
    assert impossible.calibration[-1].count == 2  # a confidence of exactly 1 is in the last bin
    assert impossible.calibration_error == 0.5


def test_a_thousand_classes():
    logits = torch.randn(500, 1000)
    scores = score_predictions(logits, torch.randint(0, 1000, (500,)))
    assert len(scores.confusion) == 1000 and scores.auroc is None


def test_scores_are_json():
    scores = score_predictions(torch.randn(4, 3), torch.tensor([0, 0, 1, 1]), ["a", "b", "c"])
    values = json.loads(json.dumps(scores.to_dict(), allow_nan=False))
    assert values["per_class"][2]["name"] == "c" and values["per_class"][2]["recall"] is None
    assert values["confusion"] == [list(row) for row in scores.confusion] and len(values["calibration"]) == 15


@pytest.mark.parametrize(
    ("outputs", "labels", "options", "message"),
    [
        (torch.zeros(2, 3, 1), torch.zeros(2), {}, r"expected outputs \[N, K\] and labels \[N\], got \[2, 3, 1\] and \[2\]"),
        (torch.zeros(2, 3), torch.zeros(3), {}, r"got \[2, 3\] and \[3\]"),
        (torch.zeros(0, 3), torch.zeros(0), {}, "no samples to score"),
        (torch.zeros(2, 3), torch.zeros(2), {"classes": ["a", "b"]}, "outputs for 3 classes need as many names.*; got 2"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), {}, "labels of 3 classes lie in 0 to 2, got 0 to 3"),
        (torch.tensor([[0, 1.0], [0, math.nan]]), torch.zeros(2), {}, "outputs of 1 samples are NaN.*, the first is sample 1"),
        (torch.tensor([[2.0, 1.0]]), torch.zeros(1), {"probabilities": True}, "sum to 1 in each row; for logits leave"),
    ],
)
def test_messages(outputs, labels, options, message):
    with pytest.raises(ValueError, match=message):
        score_predictions(outputs, labels, **options)
