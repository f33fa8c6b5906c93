"""What came out of a model: scores and the audit, as tables on the terminal, as JSON, as pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from revit.cli.runs import LoadedRun
from revit.data import BadImage, DataError, DataSpec, Images
from revit.data.cache import whole_file
from revit.data.loader import normalised, scaled
from revit.data.randomness import permutation
from revit.data.spec import Pixels
from revit.evaluation import (
    Audit,
    Scores,
    audit_model,
    draw_calibration,
    draw_confusion,
    draw_polar,
    errors_by_angle,
    normalised_black,
    score_predictions,
)
from revit.evaluation.collect import Outputs
from revit.evaluation.segmentation import MaskOutputs, MaskScores, score_masks
from revit.training.run_folder import environment

AUDITED_PIXELS = 1024 * 32 * 32  # the 1,024 images of the paper's protocol if they are small, at least 64 if they are large
POLAR_SHARE, POLAR_STEP = 16, 15  # every angle costs two passes: one image in 16, 8 at least, shows the shape of the curve


def report_scores(
    outputs: Outputs | MaskOutputs, run: LoadedRun, split: str, folder: Path, name: str, **more: Any
) -> Scores | MaskScores:
    """Scores of a split, written as `name`.json with what they need to be believed, with more facts, and as pictures."""
    scores: Scores | MaskScores
    if isinstance(outputs, MaskOutputs):
        scores = score_masks(outputs, run.spec.classes)
    else:
        scores = score_predictions(outputs.logits, outputs.labels, run.spec.classes)
        draw_calibration(scores.calibration, folder / "calibration.png")
    draw_confusion(scores.confusion, run.spec.classes, folder / "confusion_matrix.png")
    facts = {
        "split": split,
        "images": len(outputs.samples),
        "skipped": [reason for _, reason in outputs.bad],
        "data": run.spec.source,
        "seed": run.recipe["train"]["seed"] if run.checkpoint is not None else None,
        "epoch": run.checkpoint.state["epoch"] if run.checkpoint is not None else None,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        **environment(),
        **more,
    }
    write_json(folder / f"{name}.json", {**facts, **scores.to_dict()})
    return scores


def print_scores(console: Console, scores: Scores | MaskScores, split: str, images: int) -> None:
    """Accuracy and friends in two lines; the classes in a table, the worst first if there are many."""
    if isinstance(scores, MaskScores):
        _print_mask_scores(console, scores, split, images)
        return
    area = f"  AUROC {scores.auroc:.4f}" if scores.auroc is not None else ""
    console.print(
        f"{split}: accuracy [bold]{scores.accuracy:.2%}[/bold] of {images:,} images  balanced {scores.balanced_accuracy:.2%}"
        f"  loss {scores.loss:.4f}  calibration error {scores.calibration_error:.2%}{area}",
        highlight=False,
        soft_wrap=True,
    )
    rows = sorted(scores.per_class, key=lambda row: row.f1 or 0.0)[:10] if len(scores.per_class) > 20 else scores.per_class
    table = Table(
        box=None, title="the ten hardest classes" if len(rows) < len(scores.per_class) else None, title_justify="left"
    )
    for column in ("class", "precision", "recall", "F1", "images"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for row in rows:
        table.add_row(row.name, *map(_percent, (row.precision, row.recall, row.f1)), f"{row.support:,}")
    console.print(table)


def _print_mask_scores(console: Console, scores: MaskScores, split: str, images: int) -> None:
    console.print(
        f"{split}: mean IoU [bold]{scores.mean_iou:.2%}[/bold] of {images:,} images  pixel accuracy {scores.accuracy:.2%}"
        f"  loss {scores.loss:.4f}",
        highlight=False,
        soft_wrap=True,
    )
    many = len(scores.per_class) > 20
    rows = sorted(scores.per_class, key=lambda row: row.iou or 0.0)[:10] if many else scores.per_class
    table = Table(box=None, title="the ten hardest classes" if many else None, title_justify="left")
    for column in ("class", "IoU", "precision", "recall", "pixels"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for row in rows:
        table.add_row(row.name, *map(_percent, (row.iou, row.precision, row.recall)), f"{row.support:,}")
    console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def report_audit(images: Images, run: LoadedRun, folder: Path) -> Audit:
    """The equivariance of a trained model on images of a split: `audit.json` and `audit_polar.png`."""
    count = min(1024, max(64, AUDITED_PIXELS // (run.spec.size[0] * run.spec.size[1])))
    x = choose_images([images], run.spec, count)
    fill = normalised_black(run.spec)
    audit = audit_model(run.model, x, run.group, fill=fill, batch_size=64)
    few, degrees = x[: max(8, len(x) // POLAR_SHARE)], range(0, 360, POLAR_STEP)
    by_angle = errors_by_angle(run.model, few, degrees=degrees, fill=fill, batch_size=64)
    write_json(folder / "audit.json", {"audit": audit.to_dict(), "by_angle": by_angle.to_dict(), **environment()})
    title = f"Predictions that stay when images turn ({by_angle.samples} images, %)"
    shown = {"full frame": by_angle.frame, "central disc": by_angle.disc}
    series = {name: [found.consistency_percent for found in agreements] for name, agreements in shown.items()}
    draw_polar(by_angle.degrees, series, folder / "audit_polar.png", title=title, limit=100)
    return audit


def print_audit(console: Console, audit: Audit) -> None:
    """One line a feature, and the verdict."""
    for name in ("lift", "pre_class", "logits"):
        if name in audit.stages:
            error = max(audit.stages[name].relative)
            console.print(f"  relative equivariance error, {name:<10} {error:.1e}", highlight=False)
    if audit.mean_consistency_percent is not None:
        moves = "turns and mirrors" if audit.group.endswith("m") else "turns"
        console.print(
            f"  [bold]{audit.mean_consistency_percent:.2f} %[/bold] of predictions are the same under all"
            f" {len(audit.elements)} {moves} of {audit.group} ({audit.samples:,} images)",
            highlight=False,
            soft_wrap=True,
        )


def choose_images(splits: Sequence[Images], spec: DataSpec, count: int) -> Tensor:
    """A fixed random choice of normalised images [count, C, H, W], from the next split where one has too few."""
    chosen: list[Pixels] = []
    for images in splits:
        for i in permutation(len(images), 0, "audit"):
            if len(chosen) == count:
                break
            with suppress(BadImage):  # the loader has reported it
                chosen.append(images.read(int(i)))
    if not chosen:
        raise DataError(f"{spec.name}: no image that can be read")
    return normalised(scaled(torch.from_numpy(np.stack(chosen)), torch.device("cpu"), torch.float32), spec)


def write_json(path: Path, value: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(value, indent=1).encode())
