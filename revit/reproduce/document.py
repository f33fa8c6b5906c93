"""The page of all results and the headline table, as Markdown, from result files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from revit.reproduce.gallery import FIGURES
from revit.reproduce.paper import PaperTable, paper_tables
from revit.reproduce.plan import BUDGETS, about, with_rows_beside
from revit.reproduce.ranking import rankings, verdict
from revit.reproduce.results import Result
from revit.reproduce.tables import NOT_OBTAINED, Line, compare, further_lines

INTRODUCTION = """# Results

Made by `python benchmarks/tables.py` from the files in `results/`; a test fails when this page is stale. Each number has its
command, commit, seed and data source in its result file. Model selection uses the validation split; the test split is read
once, at the end of a training. What was not obtained says so.

Budgets: {budgets}. **Numbers of the `smoke` budget show that a row can be run from end to end on two cores; they say nothing
about which model is better**; the difference to the paper's is printed for completeness. Equivariance is another matter: its
protocol runs at its true number of samples in every budget, and exactness does not depend on how long a model was trained.

Tables are numbered as `revit reproduce` calls them; headings give the paper's own number.
"""

TRAINED = ("cpu", "full")
"""Budgets that train a model as well as it gets, or as hours allow."""
RANKINGS = """## Who is ahead

Models that were trained on the same images in the same budget. The standard error is that of the number of test images alone;
seeds differ by about as much on rotated digits. Differences of less than two of them decide nothing. Training options were
chosen for REViT and are the same for its opponents, for which no rate was tried but that of the Z2-CNN on CIFAR-10: ViT and
CvT are far from done after so few epochs. On histology test and validation accuracies lie far apart: one seed of 400 images
says little.
"""
TRIALS_FILE = "trials.yaml"
CHOICES = """## Choices, and their evidence

What was tried before the trainings of this page, judged by validation images; the files are in `results/trials`. Finished
runs without `--no-test` read their test images at their end. Choices rest on validation and training accuracies, but one of
these figures, that of p8 after 20 epochs, was known when the stronger bends of the cpu budget were chosen. With 2,000
validation images and accuracies near 98.5 %, one standard error is 0.27 points: differences of a few tenths between two runs
decide little."""
COMPLEXITY_FILE = "complexity.json"
EXPLANATION = """What of the paper's figures can be reproduced: their kind, not their digits. The paper does not name its
tool; its column names are those of torchinfo, which counts weights times output positions and leaves out the products of
attention, and both of its series grow in proportion to the group as such a count does ("by parameters" above: 33.8 M for z2
where the paper has 29.1 M). The products that are really computed are about twice as many for the convolutions alone (a
steerable 5 x 5 filter has 11 parameters and 25 pixels), plus those of attention, which at 28 x 28 positions weigh as much
again; formula and torch's own counter agree to the unit. The paper's figures are exactly 4 and 8 times that of z2: that is
one width of 16 fields in every group, whose parameters would grow from 44K to 173K and 345K, and not, as its text says,
models of about 44K parameters each, which are what is compared here. With that one width, the count by parameters is 33.79,
134.95 and 269.82 M, 16 % above the paper's at each group, and twice the outputs of all layers plus the weights for one image
are 8.7, 34.5 and 68.9 MB, where the paper has 9.09, 35.84 and 71.72 MB under "total size": an estimate for one image, not a
measured peak. Memory measured here is the peak of the process for the whole batch.
G-SA against G-CSA (spatial, full) on z2, p4 and p8: 31, 227 and 866 M products against 146, 427 and 618 M; the memory of a
training step stands in the table above, that of G-CSA about a half of G-SA's on p4 and a third on p8. So the paper's half of
the multiply-adds and third of the memory come out for p8 in kind (0.7 and a third), and the products not for z2 and p4, where
the 1 x 1 projections and 25 neighbours of G-SA are cheap. That is G-SA as computed here; with every score of Eq. 5 formed, as
in the public code, it has 30, 419 and 2,457 M products, four times those of G-CSA on p8. Its count by parameters is 13.7, 54.1
and 108.0 M, where the paper has 60.16, 232.49 and 462.29 M: no count that was tried gives those."""


def results_page(folder: Path) -> str:
    """`docs/results.md`."""
    budgets = "; ".join(f"`{name}`: {about(name)}" for name in BUDGETS)
    parts = [INTRODUCTION.format(budgets=budgets)]
    for table in paper_tables().values():
        if table.name == "table2":
            parts.append(_complexity(table, folder))
        elif table.name.startswith("table"):
            parts.append(_section(with_rows_beside(table), folder))
    return "\n".join([parts[0], *_rankings(folder), *parts[1:], *_choices(folder), _figures(folder)])


def _rankings(folder: Path) -> list[str]:
    """Who is ahead, in words and numbers."""
    parts = []
    header = ["model", "parameters", "epochs", "seeds", "test accuracy (%)", "standard error"]
    header += ["validation accuracy (%)", "same under its group (%)"]
    for dataset, (budget, rows) in rankings(folder).items():
        cells = []
        for row in rows:
            figures = ["" if x is None else f"{x:.2f}" for x in (row.accuracy, row.error, row.validation, row.consistency)]
            cells.append([row.row, f"{row.parameters:,}", str(row.epochs), str(row.seeds), *figures])
        images = "; ".join(dict.fromkeys(row.data for row in rows))
        parts += [
            f"### {dataset}, budget `{budget}`\n",
            f"Images: {images}\n",
            f"{_markdown(header, cells)}\n",
            f"{verdict(rows)}\n",
        ]
    return [RANKINGS, *parts] if parts else []


def headline(folder: Path) -> str:
    """The README's table: what the paper reports of equivariance before the head, and what was measured here."""
    rows = []
    tables = paper_tables()
    for name in ("table7", "table12"):
        before_the_head = tables[name].columns["pre_class"]
        for line in compare(tables[name], folder):
            row = next(row for row in tables[name].rows.values() if row.label == line.row)
            if line.column == before_the_head and row.group in ("p4", "p4m") and line.results:
                result = line.results[0]
                data = "ImageNet model, random weights, " + row.label if name == "table12" else row.label
                worst, kept = result.values["largest_relative_exact"], result.values["consistency"][0]
                rows.append([data, line.paper, line.ours, f"{worst:.1e}", f"{kept:.2f} %", f"{result.facts['samples']:,}"])
    header = [
        "model",
        "paper: error before the head",
        "ours",
        "largest relative error of any stage",
        "same prediction",
        "images",
    ]
    return _markdown(header, rows)


def accuracies(folder: Path) -> str:
    """The README's other table: every accuracy of a model that was trained for more than a comparison of rows."""
    found: dict[str, list[str]] = {}
    sources: dict[str, None] = {}
    for name in ("table1", "table3a", "table3b", "table3c", "table4"):
        for line in compare(with_rows_beside(paper_tables()[name]), folder, TRAINED):
            if not line.results or line.results[0].facts["recipe"] in found:
                continue
            facts = [result.facts for result in line.results]
            images = line.column.replace(" accuracy (%)", "")
            minutes = " and ".join(f"{fact['training_seconds'] / 60:.0f}" for fact in facts)
            commands = dict.fromkeys(f"`{_without_folders(fact['command'])}`" for fact in facts)
            found[facts[0]["recipe"]] = [
                line.row, images, f"{facts[0]['parameters']:,}", line.paper, line.ours,
                str(line.seeds), str(facts[0]["epochs"]), minutes, ", ".join(commands),
            ]  # fmt: skip
            sources[f"{images}: {line.data}"] = None
    header = ["row", "images", "parameters", "paper (%)", "ours (%)", "seeds", "epochs", "minutes", "command"]
    return f"{_markdown(header, list(found.values()))}\n\nImages that stand for {'; for '.join(sources)}."


def _without_folders(command: str) -> str:
    """A command without the options that say where results and runs go."""
    words = command.split()
    for option in ("--results", "--runs"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    return " ".join(words)


def _section(table: PaperTable, folder: Path) -> str:
    lines = compare(table, folder)
    relative = any(line.relative for line in lines)
    header = ["row", "", "paper", "ours", "difference", *(["relative error"] if relative else []), "seeds", "budget"]
    rows = []
    for line in lines:
        extra = [line.relative] if relative else []
        count = str(line.seeds) if line.seeds else ""
        rows.append([line.row, line.column, line.paper, line.ours, line.difference, *extra, count, line.budget])
    parts = [f"## {table.name}: {table.title} (Table {table.number} of the paper)", _markdown(header, rows)]
    parts += _missing(lines)
    if further := _further(table, folder):
        parts.append(further)
    if origins := _origins([result for line in lines for result in line.results]):
        parts.append(origins)
    notes = [f"- {row.label}: {row.note}" for row in table.rows.values() if row.note]
    if notes:
        parts.append("On the paper's numbers:\n\n" + "\n".join(dict.fromkeys(notes)))
    return "\n\n".join(parts) + "\n"


def _choices(folder: Path) -> list[str]:
    """The questions that were settled by trials, each with its runs and what follows from them."""
    path = folder / TRIALS_FILE
    if not path.is_file():
        return []
    parts = [CHOICES]
    header = ["trial", "validation accuracy (%)", "parameters", "epochs", "minutes", "threads", "seed", "commit", "command"]
    for trial in yaml.safe_load(path.read_text(encoding="utf-8")):
        rows = []
        for name, label in trial["runs"].items():
            facts = json.loads((folder / "trials" / f"{name}.json").read_text(encoding="utf-8"))
            epochs = str(facts["epochs"])
            if "epochs_planned" in facts:
                epochs += f" of {facts['epochs_planned']}, stopped"
            rows.append([
                label, f"{100 * facts['validation_accuracy']:.2f}", f"{facts['parameters']:,}", epochs,
                f"{facts['training_seconds'] / 60:.0f}", str(facts["threads"]), str(facts["seed"]), facts["commit"],
                f"`{facts['command']}`",
            ])  # fmt: skip
        parts += [f"### {trial['question']}", _markdown(header, rows), trial["answer"].strip()]
    return ["\n\n".join(parts) + "\n"]


def _figures(folder: Path) -> str:
    """The figures that were drawn, for a page that lies beside the folder of results."""
    titles = {**FIGURES, "complexity": "cost against the order of the group"}
    drawn = [name for name in titles if (folder / "figures" / f"{name}.png").is_file()]
    pictures = [f"### {name}: {titles[name]}\n\n![{titles[name]}](../results/figures/{name}.png)\n" for name in drawn]
    return "\n".join(["## Figures\n", *pictures])


def _missing(lines: list[Line]) -> list[str]:
    """One sentence on the rows without a number of ours."""
    gone = [line for line in lines if line.ours == NOT_OBTAINED]
    if not gone:
        return []
    reasons: dict[str, list[str]] = {}
    for line in gone:
        reasons.setdefault(line.why or "not run yet", []).append(line.row)
    return ["Not obtained: " + "; ".join(f"{', '.join(dict.fromkeys(rows))} ({why})" for why, rows in reasons.items()) + "."]


def _further(table: PaperTable, folder: Path) -> str:
    """Audits that the paper does not have."""
    rows = []
    for _, experiment, budget, result in further_lines(table.name, folder):
        values = result.values
        worst = values.get("largest_relative_exact")
        cells = [values[name][0] if name in values else None for name in ("lift_relative", "pre_class_relative")]
        shown = ["-" if value is None else f"{value:.1e}" for value in (*cells, worst)]
        rows.append([f"`{experiment.recipe}`", experiment.weights, str(experiment.group), *shown, budget])
    header = [
        "also audited",
        "weights",
        "group",
        "relative, lift",
        "relative, before the head",
        "largest of any stage, exact elements",
        "budget",
    ]
    return _markdown(header, rows) if rows else ""


def _origins(results: list[Result]) -> str:
    """What each number was made from."""
    rows: dict[str, list[str]] = {}
    for result in results:
        facts = result.facts
        epochs = (
            f"{facts['epochs']} epochs, {facts['training_seconds']:.0f} s"
            if "epochs" in facts
            else f"{facts['samples']:,} samples"
        )
        rows[result.path.name] = [
            f"`{facts['recipe']}`", f"{facts['parameters']:,}", epochs, f"{facts['data']} ({facts['data_fingerprint']})",
            f"`{facts['command']}`, seed {facts['seed']}, commit {facts['commit']}, torch {facts['versions']['torch']}",
        ]  # fmt: skip
    header = ["recipe", "parameters", "run", "data (fingerprint)", "origin"]
    return (
        "<details><summary>Where these numbers come from</summary>\n\n"
        + _markdown(header, list(rows.values()))
        + "\n\n</details>"
        if rows
        else ""
    )


def _complexity(table: PaperTable, folder: Path) -> str:
    """Table 2, from the benchmark's own file."""
    parts = [f"## {table.name}: {table.title} (Table {table.number} of the paper)"]
    path = folder / COMPLEXITY_FILE
    if not path.is_file():
        return "\n\n".join([*parts, "Not obtained: run `revit reproduce table2`."]) + "\n"
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = [_complexity_row(row) for row in report["rows"]]
    there = {row["model"] for row in report["rows"]}
    for row in table.rows.values():
        if row.family == "G-SA" and not any(name.startswith("gsa") for name in there):
            figures = [row.values[column].text for column in ("mul_adds", "memory")]
            rows.append([row.label, str(row.group), NOT_OBTAINED, *[""] * 8, *figures])
    header = [
        "model", "group", "parameters", "multiply-adds (M), weights", "attention", "by counter", "by parameters",
        "memory (MiB), forward", "training step", "ms an image, forward", "training step", "paper, multiply-adds (M)",
        "paper, total size (MB)",
    ]  # fmt: skip
    origin = (
        f"`{report['command']}`, commit {report['commit']}, {report['size']} x {report['size']} pixels, batch"
        f" {report['batch_size']}, {report['threads']} threads, {report['machine']}; plot in `results/figures/complexity.png`"
    )
    return "\n\n".join([*parts, _markdown(header, rows), origin, EXPLANATION]) + "\n"


def _complexity_row(row: dict[str, Any]) -> list[str]:
    name = " ".join(filter(None, (row["model"], row["attention"], row["projection"])))
    counted = row["counted_convolution_macs"] + row["counted_attention_macs"]
    millions = [row["convolution_macs"], row["attention_macs"], counted, row["parameter_macs"]]
    figures = [
        *(f"{value / 1e6:.2f}" for value in millions),
        *(f"{row[f'{task}_bytes'] / 2**20:.1f}" for task in ("forward", "step")),
        *(f"{1000 * row[f'{task}_seconds']:.2f}" for task in ("forward", "step")),
    ]
    paper = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("paper_mul_adds_m", "paper_memory_mb")]
    return [name, row["group"], f"{row['parameters']:,}", *figures, *paper]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
