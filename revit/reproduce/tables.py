"""The tables of the paper again: ours beside theirs, from result files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from revit.reproduce.paper import PaperTable, PaperValue, paper_tables
from revit.reproduce.plan import BUDGETS, Cell, Experiment, cells, further, seeds, with_rows_beside
from revit.reproduce.results import Result, read_result

NOT_OBTAINED = "not obtained"


@dataclass(frozen=True)
class Line:
    """One number of the paper and ours."""

    row: str
    column: str
    paper: str
    ours: str  # the number, or "not obtained"
    difference: str
    relative: str  # relative error, for the equivariance tables
    seeds: int
    budget: str
    data: str
    why: str  # why it was not obtained
    results: tuple[Result, ...]


def find_table(name: str) -> list[PaperTable]:
    """The tables of a name: `table3` is three of them."""
    tables = paper_tables()
    found = [table for key, table in tables.items() if key == name or (name == "table3" and key.startswith("table3"))]
    return [with_rows_beside(table) for table in found]


def compare(
    table: PaperTable, folder: Path, budgets: Sequence[str] = BUDGETS, why: dict[Experiment, str] | None = None
) -> list[Line]:
    """A line for every number. Rows are there to be compared: in each column the budget that has most of them goes before the
    others, the largest of several. Elsewhere the largest that was run is taken. `smoke` compares nothing, so it comes last."""
    ordered = sorted(budgets, key=BUDGETS.index, reverse=True)
    found = {budget: [_line(table, cell, folder, [budget], why or {}) for cell in cells(table)] for budget in ordered}
    lines = []
    for i, cell in enumerate(cells(table)):
        column = table.columns[cell.column]

        def rows(budget: str, column: str = column) -> int:
            return sum(bool(line.results) for line in found[budget] if line.column == column and budget != "smoke")

        choices = sorted(ordered, key=rows, reverse=True)[:1] + ordered
        lines.append(next((found[budget][i] for budget in choices if found[budget][i].results), found[ordered[0]][i]))
    return lines


def _line(table: PaperTable, cell: Cell, folder: Path, budgets: Sequence[str], why: dict[Experiment, str]) -> Line:
    row = table.rows[cell.row]
    paper = row.values[cell.column]
    label, column = row.label, table.columns[cell.column]
    for budget in sorted(budgets, key=BUDGETS.index, reverse=True):
        found = [_results(folder, experiment, budget) for experiment in cell.experiments]
        if found and all(found):
            ours, spread = _value(cell, found)
            if ours is None:
                continue
            flat = tuple(result for results in found for result in results)
            return Line(
                row=label, column=column, paper=paper.text, ours=_number(ours, spread, paper),
                difference=_difference(ours, paper), relative=_relative(cell, flat), seeds=min(map(len, found)), budget=budget,
                data="; ".join(dict.fromkeys(str(result.facts["data"]) for result in flat)), why="", results=flat,
            )  # fmt: skip
    reason = next((why[e] for e in cell.experiments if e in why), "")
    return Line(label, column, paper.text, NOT_OBTAINED, "", "", 0, "", "", reason, ())


def _results(folder: Path, experiment: Experiment, budget: str) -> list[Result]:
    found = (read_result(folder, experiment, budget, seed) for seed in range(max(seeds(budget), 8)))
    return [result for result in found if result is not None]


def _value(cell: Cell, found: list[list[Result]]) -> tuple[float | None, float | None]:
    """The mean over experiments of the mean over seeds; the spread that belongs to it."""
    each: list[list[float]] = []
    for results in found:
        values = [_first(result.values.get(cell.value)) for result in results]
        if None in values:
            return None, None
        each.append([value for value in values if value is not None])
    means = [fmean(values) for values in each]
    if cell.row == "difference":  # REViT minus ViT: the last three are ViT's
        return fmean(means[:-3]) - fmean(means[-3:]), None
    if len(each) == 1 and len(each[0]) > 1:
        return means[0], stdev(each[0])
    if len(each) == 1 and isinstance(own := found[0][0].values.get(cell.value), list):
        return means[0], own[1]  # over the elements of the group, as the paper has it
    return fmean(means), None


def _first(value: Any) -> float | None:
    if isinstance(value, list):
        return None if value[0] is None else float(value[0])
    return None if value is None else float(value)


def _number(value: float, spread: float | None, paper: PaperValue) -> str:
    """As many digits as the paper gives, but never a rounding error printed as an exact zero."""
    text = _digits(value, paper)
    return text if spread is None else f"{text} ± {_digits(spread, paper)}"


def _digits(value: float, paper: PaperValue) -> str:
    decimals = len(paper.text.split("±")[0].strip().partition(".")[2])
    small = decimals > 3
    if small and value != 0 and abs(value) < 10.0 ** (1 - decimals):
        return f"{value:.1e}"
    return f"{value:.{max(decimals, 2)}f}"


def _difference(ours: float, paper: PaperValue) -> str:
    if math.isnan(paper.mean):
        return ""
    decimals = len(paper.text.split("±")[0].strip().partition(".")[2])
    return f"{ours - paper.mean:+.{max(decimals, 2)}f}"


def _relative(cell: Cell, results: tuple[Result, ...]) -> str:
    found = [_first(result.values.get(f"{cell.value}_relative")) for result in results]
    return f"{max(value for value in found if value is not None):.1e}" if any(v is not None for v in found) else ""


def further_lines(table: str, folder: Path, budgets: Sequence[str] = BUDGETS) -> list[tuple[str, Experiment, str, Result]]:
    """Audits that the paper does not have: the other weights, the released strides; with the row and the budget."""
    lines = []
    for row, experiment in further(table):
        for budget in sorted(budgets, key=BUDGETS.index, reverse=True):
            if results := _results(folder, experiment, budget):
                lines.append((row, experiment, budget, results[0]))
                break
    return lines
