"""What has to be run for a cell of a table: which recipe, changed how by a budget, measured how."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from revit.reproduce.paper import PaperRow, PaperTable, PaperValue, paper_tables

BUDGETS = ("smoke", "short", "cpu", "full")  # from the smallest to the largest
ACCURACY, EQUIVARIANCE, RANDOM, RELEASED = "accuracy", "equivariance", "random", "released"
STAGES = {"lift": "lift", "stem": "lift", "pre_class": "pre_class", "consistency": "consistency"}
"""Columns of the equivariance tables and what they are called in results."""


@dataclass(frozen=True)
class Experiment:
    """One thing to run: a recipe, and for audits the group whose elements are tried and the weights."""

    kind: str  # accuracy, or equivariance
    recipe: str
    group: str | None = None
    weights: str = "trained"  # or random

    def file_name(self, budget: str, seed: int) -> str:
        parts = [self.kind, self.recipe]
        if self.kind == EQUIVARIANCE:
            parts += [str(self.group), self.weights]
        return "-".join([*parts, budget, f"seed{seed}.json"])


@dataclass(frozen=True)
class Cell:
    """A number of a table: the mean of a value over experiments (one, but for the means of Table 10), minus another cell."""

    row: str
    column: str
    experiments: tuple[Experiment, ...]
    value: str  # key in the values of a result


@cache
def _plan() -> dict[str, Any]:
    text = (resources.files("revit.reproduce") / "plan.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def seeds(budget: str) -> int:
    return int(_plan()["budgets"][budget]["seeds"])


def about(budget: str) -> str:
    return str(_plan()["budgets"][budget]["about"])


def overrides(budget: str, recipe: str, dataset: str) -> dict[str, Any]:
    """What a budget changes of a recipe, as section.option: first for all recipes of a dataset, then for this one.

    A budget that is `like` another one changes what that one does, and then gives all recipes of a dataset as many epochs, and
    some of them options of their own.
    """
    chosen = _plan()["budgets"][budget]
    if "like" in chosen:
        own = chosen.get("recipes", {}).get(recipe, {})
        return overrides(chosen["like"], recipe, dataset) | {"train.epochs": chosen["epochs"][dataset]} | own
    values: dict[str, Any] = {}
    for part in (chosen["datasets"].get(dataset, {}), chosen["recipes"].get(recipe, {})):
        for name, value in part.items():
            values |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return values


def on_request(budget: str, table: str) -> list[str]:
    """Rows of a table that a budget leaves out unless they are asked for by name."""
    return list(_plan()["budgets"][budget].get("on_request", {}).get(table, []))


def shipped_weights(budget: str, recipe: str, seed: int) -> str | None:
    """What the trained weights of a recipe are called in the package, if they are there."""
    name: str | None = _plan()["budgets"][budget].get("weights", {}).get(recipe) if seed == 0 else None
    return name


def cells(table: PaperTable) -> list[Cell]:
    """Every number of a table, in its order."""
    plan = _plan()
    found = []
    for row in table.rows.values():
        for column in row.values:
            if recipe := plan[ACCURACY].get(table.name, {}).get(row.name, {}).get(column):
                value = "top5_accuracy" if column == "top5" else "accuracy"
                found.append(Cell(row.name, column, (Experiment(ACCURACY, recipe),), value))
            elif recipe := plan[EQUIVARIANCE].get(table.name, {}).get(row.name):
                weights = "random" if table.name == "table12" else "trained"
                experiment = Experiment(EQUIVARIANCE, recipe, row.group, weights)
                found.append(Cell(row.name, column, (experiment,), STAGES[column]))
            elif table.name in plan[RANDOM] and row.name in (*plan[RANDOM][table.name], "difference"):
                found.append(_random_cell(row.name, column))
            else:
                raise ValueError(f"plan.yaml has nothing to run for {column} of {row.name} in {table.name}")
    return found


def with_rows_beside(table: PaperTable) -> PaperTable:
    """A table with further rows at its end: models that the paper has in another table, or not at all, on the same data."""
    rows = dict(table.rows)
    for name, entry in _plan()["beside"].get(table.name, {}).items():
        if "table" in entry:
            source = paper_tables()[entry["table"]]
            row = source.rows[name]
            values = {column: row.values[column] for column in table.columns}
            rows[name] = replace(row, label=f"{row.label} (Table {source.number})", values=values, note=None)
        else:
            values = dict.fromkeys(table.columns, PaperValue(math.nan, None, "-"))
            rows[name] = PaperRow(name, f"{entry['label']} (not in the paper)", None, None, {}, values, None)
    return replace(table, rows=rows)


def _random_cell(row: str, column: str) -> Cell:
    """Table 10: the trained models of a group on all datasets, under random turns."""
    recipes = _plan()[RANDOM]["table10"]
    names = recipes["overall"] + recipes["vit"] if row == "difference" else recipes[row]
    experiments = tuple(Experiment(EQUIVARIANCE, name, own_group(name)) for name in names)
    return Cell(row, column, experiments, f"random_{column}")


def further(table: str) -> list[tuple[str, Experiment]]:
    """Audits beside those of the cells, by row: other weights, and the strides of the released code."""
    plan, tables = _plan(), paper_tables()
    if table not in plan[EQUIVARIANCE]:
        return []
    other = "trained" if table == "table12" else "random"
    rows = tables[table].rows
    wanted = [(row, recipe, other) for row, recipe in plan[EQUIVARIANCE][table].items()]
    wanted += [(row, recipe, "random") for row, recipe in plan[RELEASED].get(table, {}).items()]
    return [(row, Experiment(EQUIVARIANCE, recipe, rows[row].group, weights)) for row, recipe, weights in wanted]


def own_group(recipe: str) -> str:
    """The group under which the equivariance tables audit a recipe; a plain ViT under the first of its rows."""
    rows = {name: row for table in paper_tables().values() for name, row in table.rows.items()}
    for table in _plan()[EQUIVARIANCE].values():
        for row, name in table.items():
            if name == recipe:
                return str(rows[row].group)
    raise ValueError(f"no equivariance table has a row for {recipe}")


def turns_at_random(experiment: Experiment) -> bool:
    """Whether Table 10 needs this audit to turn its images by random angles too."""
    recipes = _plan()[RANDOM]["table10"]
    wanted = {*recipes["overall"], *recipes["vit"]}
    return experiment.weights == "trained" and experiment.recipe in wanted and experiment.group == own_group(experiment.recipe)
