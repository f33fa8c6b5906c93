"""Who is ahead: the models that were trained on the same images in the same budget, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from revit.reproduce.paper import paper_tables
from revit.reproduce.plan import with_rows_beside
from revit.reproduce.tables import Line, compare

TABLES = ("table1", "table3a", "table3b", "table3c", "table4")
COMPARED = ("short", "cpu", "full")
"""Budgets whose rows can be compared, from the smallest to the largest."""
OURS, PLAIN = "CSA", "Z2-CSA"


@dataclass(frozen=True)
class Standing:
    """A row and what its trainings found on the test images."""

    row: str
    parameters: int
    epochs: int
    seeds: int
    accuracy: float  # percent, mean over the seeds
    validation: float | None  # the same of the validation images, which chose the epoch
    error: float | None  # standard error for the number of test images, in points
    consistency: float | None  # predictions that stay under the group of the row, percent
    data: str

    @property
    def is_ours(self) -> bool:
        return OURS in self.row


def rankings(folder: Path) -> dict[str, tuple[str, list[Standing]]]:
    """By dataset: the budget that has most of its rows (the largest of several), and these rows, the best one first."""
    found: dict[str, dict[str, dict[str, Standing]]] = {}
    for budget in COMPARED:
        for name in TABLES:
            for line in compare(with_rows_beside(paper_tables()[name]), folder, [budget]):
                if line.results:
                    rows = found.setdefault(line.column.removesuffix(" accuracy (%)"), {}).setdefault(budget, {})
                    rows.setdefault(line.results[0].facts["recipe"], _standing(line))
    chosen = {}
    for dataset, budgets in found.items():
        budget = max(budgets, key=lambda name: (len(budgets[name]), COMPARED.index(name)))
        if len(budgets[budget]) > 1:
            chosen[dataset] = budget, sorted(budgets[budget].values(), key=lambda row: -row.accuracy)
    return chosen


def verdict(rows: list[Standing]) -> str:
    """In words: which equivariant models are ahead of the same one without a group, and which opponents are ahead of ours."""
    sentences = []
    ours = [row for row in rows if row.is_ours]
    if plain := next((row for row in ours if row.row == PLAIN), None):
        ahead = [_beside(row, plain) for row in ours if row.accuracy > plain.accuracy]
        behind = [_beside(row, plain) for row in ours if row != plain and row.accuracy <= plain.accuracy]
        sentences.append(f"Ahead of {PLAIN}: {', '.join(ahead) or 'none'}. Not ahead of it: {', '.join(behind) or 'none'}.")
    if ours and len(ours) < len(rows):
        best, others = ours[0], [row for row in rows if not row.is_ours]
        ahead = [_beside(row, best) for row in others if row.accuracy >= best.accuracy]
        behind = [_beside(row, best) for row in others if row.accuracy < best.accuracy]
        sentences.append(
            f"Behind the best REViT ({best.row}, {best.parameters:,} parameters): {', '.join(behind) or 'none'}. "
            f"Not behind it: {', '.join(ahead) or 'none'}."
        )
    return " ".join(sentences)


def _beside(row: Standing, other: Standing) -> str:
    return f"{row.row} ({row.accuracy - other.accuracy:+.2f})"


def _standing(line: Line) -> Standing:
    facts: list[dict[str, Any]] = [result.facts for result in line.results]
    accuracy = fmean(fact["values"]["accuracy"] for fact in facts)
    images = facts[0].get("images")
    chosen, kept = (_mean(fact.get(name) for fact in facts) for name in ("validation_accuracy", "consistency_percent"))
    return Standing(
        row=line.row, parameters=facts[0]["parameters"], epochs=facts[0]["epochs"], seeds=line.seeds, accuracy=accuracy,
        error=math.sqrt(accuracy * (100 - accuracy) / images) if images else None,
        validation=None if chosen is None else 100 * chosen, consistency=kept, data=line.data,
    )  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
