"""The figures of the paper by name. What can be made of results is made of result files alone."""

from __future__ import annotations

from pathlib import Path

from revit.reproduce.diagrams import draw_architecture, draw_projection
from revit.reproduce.figures import BubblePoint, draw_bubbles, draw_interpolation, paper_points
from revit.reproduce.paper import paper_tables
from revit.reproduce.tables import NOT_OBTAINED, compare

FIGURES = {
    "figure1": "accuracy on rotated digits and histology by model and group",
    "figure2": "the convolutional projection to queries, keys and values",
    "figure3": "the architecture, lifted maps, attention on the group",
    "figure4": "what interpolation does to a turned image",
}


def draw_figure(name: str, path: Path, results: Path) -> None:
    """Draws a figure of the paper; the first from the paper's numbers and from ours, as far as they were obtained."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "figure1":
        draw_bubbles([*paper_points(), *our_points(results)], path)
    else:
        {"figure2": draw_projection, "figure3": draw_architecture, "figure4": draw_interpolation}[name](path)


def our_points(results: Path) -> list[BubblePoint]:
    """A bubble for each family and group of the tables that the chart shows, where more than a smoke run was done."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    tables = paper_tables()
    for name in ("table1", "table3a", "table3c"):
        table = tables[name]
        rows = {row.label: row for row in table.rows.values()}
        columns = {heading: column for column, heading in table.columns.items()}
        for line in compare(table, results, ("cpu", "full")):
            row = rows[line.row]
            if line.ours != NOT_OBTAINED and row.family and row.group:
                value = sum(result.values["accuracy"] for result in line.results) / len(line.results)
                found.setdefault((row.family, row.group), {})[columns[line.column]] = value
    return [BubblePoint(*key, values.get("rotmnist"), values.get("pcam"), ours=True) for key, values in found.items()]
