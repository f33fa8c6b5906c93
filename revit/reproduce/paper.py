"""The numbers of the paper as data: `paper_tables()["table1"].rows["p4-csa"].values["pcam"].mean` is 90.38.

They stand in `paper.yaml` with the digits that the paper prints, next to what we know to be wrong with some of them (`note`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from revit.groups import Group

FAMILIES = ("G-CSA", "G-SA", "G-CNN", "alpha-G-CNN", "ViT", "CvT", "RE-ResNet")


@dataclass(frozen=True)
class PaperValue:
    """A number, its spread if there is one, and how the paper writes it."""

    mean: float
    std: float | None
    text: str


@dataclass(frozen=True)
class PaperRow:
    """A line of a table: a model (family and group, where it has them), its size and its values by column."""

    name: str
    label: str
    family: str | None
    group: str | None
    parameters: Mapping[str, str]
    values: Mapping[str, PaperValue]
    note: str | None


@dataclass(frozen=True)
class PaperTable:
    """A table: headings of the columns and rows, both by name. `number` is the one that the paper prints."""

    name: str
    number: str
    title: str
    columns: Mapping[str, str]
    rows: Mapping[str, PaperRow]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """Every table of the paper by name: table1, table2, table3a, ..., table12, summary."""
    return parse_tables((resources.files("revit.reproduce") / "paper.yaml").read_text(encoding="utf-8"))


def parse_tables(text: str) -> dict[str, PaperTable]:
    """Tables in the form of `paper.yaml`; a `ValueError` names the place of what does not belong there."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the tables are not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"tables are given by name, got {content!r}")
    return {str(name): _table(str(name), values) for name, values in content.items()}


def _table(name: str, content: Any) -> PaperTable:
    _check_keys(name, content, required=("number", "title", "columns", "rows"))
    columns = {str(key): str(heading) for key, heading in content["columns"].items()}
    rows = {str(key): _row(name, str(key), values, columns) for key, values in content["rows"].items()}
    return PaperTable(name, _text(f"{name}.number", content["number"]), str(content["title"]), columns, rows)


def _row(table: str, name: str, content: Any, columns: Mapping[str, str]) -> PaperRow:
    place = f"{table}.{name}"
    _check_keys(place, content, required=("label", "values"), optional=("family", "group", "parameters", "note"))
    family, group = content.get("family"), content.get("group")
    if family is not None and family not in FAMILIES:
        raise ValueError(f"{place}: unknown family {family!r}; choose {', '.join(FAMILIES)}")
    if group is not None:
        _check_group(place, group)
    values = content["values"]
    sizes = content.get("parameters", {})
    if isinstance(sizes, str):
        sizes = dict.fromkeys(values, sizes)
    for column in (*values, *sizes):
        if column not in columns:
            raise ValueError(f"{place}: unknown column {column!r}; choose {', '.join(columns)}")
    return PaperRow(
        name=name,
        label=str(content["label"]),
        family=family,
        group=group,
        parameters={column: _text(f"{place}.parameters", size) for column, size in sizes.items()},
        values={column: _value(f"{place}.{column}", value) for column, value in values.items()},
        note=content.get("note"),
    )


def _check_group(place: str, name: Any) -> None:
    try:
        group = Group.parse(name)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if group.name != name:
        raise ValueError(f"{place}: group {name!r} is called {group} here")


def _value(place: str, value: Any) -> PaperValue:
    texts = value if isinstance(value, list) else [value]
    if len(texts) not in (1, 2):
        raise ValueError(f"{place}: a value is a number or [mean, std], got {value!r}")
    mean, *std = (_number(place, text) for text in texts)
    return PaperValue(mean, std[0] if std else None, " ± ".join(texts))


def _number(place: str, value: Any) -> float:
    text = _text(place, value)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{place}: {text!r} is not a number")
    return number


def _text(place: str, value: Any) -> str:
    """YAML reads 97.30 as a number and forgets the zero that the paper prints."""
    if not isinstance(value, str):
        raise ValueError(f'{place}: write {value!r} in quotes, "{value}", so that its digits are kept')
    return value


def _check_keys(place: str, content: Any, *, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{place}: expected {', '.join(required)}, got {content!r}")
    for key in content:
        if key not in (*required, *optional):
            raise ValueError(f"{place}: unknown key {key!r}; choose {', '.join((*required, *optional))}")
    for key in required:
        if key not in content:
            raise ValueError(f"{place}: {key} is missing")
    for key in ("columns", "rows", "values"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{place}: {key} are given by name, got {content[key]!r}")
