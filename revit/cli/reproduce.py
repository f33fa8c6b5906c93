"""`revit reproduce`: a table or a figure of the paper, ours beside theirs."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from revit.cli import complexity, train
from revit.cli.parser import Parser, UsageError
from revit.cli.report import choose_images
from revit.cli.runs import build_model, load_run
from revit.data import DataError, DataOptions, Dataset, Images, open_dataset
from revit.data.identity import dataset_fingerprint
from revit.evaluation import audit_model, normalised_black, random_transformations
from revit.evaluation.audit import SAMPLES, Audit
from revit.groups import Group
from revit.models.model_config import shipped, shipped_folder
from revit.reproduce.document import COMPLEXITY_FILE, EXPLANATION
from revit.reproduce.gallery import FIGURES, draw_figure
from revit.reproduce.paper import PaperTable, paper_tables
from revit.reproduce.plan import (
    ACCURACY,
    BUDGETS,
    Experiment,
    about,
    cells,
    further,
    on_request,
    overrides,
    seeds,
    shipped_weights,
    turns_at_random,
)
from revit.reproduce.results import read_result, write_result
from revit.reproduce.tables import NOT_OBTAINED, Line, compare, find_table, further_lines
from revit.training.recipe import ModelOptions, RecipeError, read_recipe
from revit.training.run_folder import environment

USAGE = "TABLE|FIGURE [--rows ROW ...] [--budget smoke|short|cpu|full] [--data-root DIR]"
ABOUT = """Trains or loads what a table of the paper needs, evaluates it and prints ours, the paper's and the difference. Runs
that are finished are used again, interrupted ones resumed. TABLE is table1 to table12, or `tables`; FIGURE
is figure1 to figure4, or `figures`. Results go to --results as JSON, and tables and figures are made from those alone."""


IMAGENET_CLASSES = 1000
COMPLEXITY = "table2"
COMPLEXITY_WORDS = (
    "--groups",
    "[z2,p4,p8]",
    "--models",
    "[revit,gsa_rotmnist,gcnn_rotmnist]",
    "--rounds",
    "3",
    "--parameters",
    "44700",
)
WIDTH = 110  # of the tables; a narrower terminal wraps lines, which is better than columns


class Stopped(Exception):
    """A training was interrupted; its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(words: list[str]) -> int:
    parser = Parser("reproduce", USAGE, ABOUT)
    parser.add_argument("what", metavar="TABLE|FIGURE", type=str, help="table1 to table12, tables, figure1 to figure4, figures")
    parser.add_argument(
        "--rows",
        metavar="ROW",
        type=str,
        nargs="+",
        default=[],
        help="only rows of these names, or whose names contain one of these",
    )
    parser.add_argument("--budget", default="smoke", choices=list(BUDGETS), help="how much to spend; see below")
    parser.add_argument("--seeds", metavar="N", type=int, help="runs of each row (default: as many as the budget says)")
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data")
    parser.add_argument("--results", metavar="DIR", type=str, default="results", help="folder of the result files")
    parser.add_argument("--runs", metavar="DIR", type=str, default="runs", help="folder of the trainings")
    parser.add_argument("--show", action="store_true", help="train and measure nothing: print what the result files say")
    parser.epilog = "budgets:  " + "; ".join(f"{name}: {about(name)}" for name in BUDGETS)
    options = parser.parse_args(words)
    if options.seeds is not None and not 1 <= options.seeds <= 8:
        raise UsageError(f"--seeds must be 1 to 8, got {options.seeds}")
    console = Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH)
    results = Path(options.results)
    if options.what == "figures" or options.what in FIGURES:
        for name in FIGURES if options.what == "figures" else [options.what]:
            path = results / "figures" / f"{name}.png"
            draw_figure(name, path, results)
            console.print(f"{name}: {path}", highlight=False, markup=False)
        return 0
    tables = _tables(options.what)
    runner = Runner(
        options.budget, options.data_root, results, Path(options.runs), options.seeds or seeds(options.budget), console
    )
    for table, rows in _with_rows(tables, options.rows):
        if table.name == COMPLEXITY:
            _complexity(console, results, options.show)
            continue
        try:
            if not options.show:
                runner.obtain(table, rows, named=bool(options.rows))
        except Stopped as stop:
            console.print("stopped; the same command goes on from here", highlight=False)
            return stop.code
        _print(console, table, rows, results, options.budget, runner.why)
    return 0


def _tables(name: str) -> list[PaperTable]:
    if name == "tables":
        return [table for key in paper_tables() if key.startswith("table") for table in find_table(key)]
    found = find_table(name)
    if not found:
        raise UsageError(f"unknown table or figure {name!r}; choose table1 to table12, tables, {', '.join(FIGURES)}, figures")
    return found


def _with_rows(tables: list[PaperTable], wanted: list[str]) -> list[tuple[PaperTable, list[str]]]:
    """The tables that have such rows, with these rows: not each part of a table has a row for each group."""
    missing = [text for text in wanted if not any(text in name for table in tables for name in table.rows)]
    if missing:
        there = "; ".join(f"{table.name} has {', '.join(table.rows)}" for table in tables)
        raise UsageError(f"no row {', '.join(missing)}: {there}")
    found = [(table, [name for name in table.rows if not wanted or _is_wanted(name, wanted, table)]) for table in tables]
    return [(table, rows) for table, rows in found if rows]


def _is_wanted(row: str, wanted: list[str], table: PaperTable) -> bool:
    """Whether a name is given, whole or in part. The name of a row stands for that row alone: p4-cnn is not alpha-p4-cnn."""
    return any(text == row if text in table.rows else text in row for text in wanted)


def _complexity(console: Console, results: Path, show: bool) -> None:
    """Table 2 is measured, not trained: by `revit benchmark complexity`, once."""
    path = results / COMPLEXITY_FILE
    if not path.is_file() and not show:
        complexity.run([*COMPLEXITY_WORDS, "--out", str(path), "--plot", str(results / "figures" / "complexity.png")])
    elif path.is_file():
        complexity.print_report(path)
    else:
        console.print(f"  {NOT_OBTAINED}: `revit reproduce table2` measures it", highlight=False)
        return
    console.print(EXPLANATION.replace("\n", " "), highlight=False)


class Runner:
    """Obtains results that are not there yet, one after another."""

    def __init__(self, budget: str, root: str | None, results: Path, runs: Path, seed_count: int, console: Console) -> None:
        self.budget, self.root, self.results, self.runs, self.seed_count = budget, root, results, runs, seed_count
        self.console = console
        self.why: dict[Experiment, str] = {}  # why an experiment could not be run
        self._open: dict[str, Dataset] = {}

    def obtain(self, table: PaperTable, rows: list[str], *, named: bool) -> None:
        """Everything that the rows of a table need; what cannot be had is noted and the others go on."""
        later = [] if named else on_request(self.budget, table.name)
        wanted: list[Experiment] = []
        for cell in (cell for cell in cells(table) if cell.row in rows):
            if cell.row in later:
                self.why |= dict.fromkeys(cell.experiments, f"takes long, --rows {cell.row} obtains it")
            else:
                wanted += cell.experiments
        wanted += [experiment for row, experiment in further(table.name) if row in rows]
        for experiment in dict.fromkeys(wanted):
            for seed in range(self.seed_count):
                try:
                    self._experiment(experiment, seed)
                except (DataError, RecipeError) as error:
                    self.why[experiment] = str(error)

    def _experiment(self, experiment: Experiment, seed: int) -> None:
        options = self._options(experiment.recipe)
        found = read_result(self.results, experiment, self.budget, seed)
        if found is not None and found.facts["options"] == options:
            return
        if experiment.kind == ACCURACY:
            self._accuracy(experiment, options, seed)
        else:
            self._equivariance(experiment, options, seed)

    def _options(self, recipe: str) -> dict[str, Any]:
        """What the budget changes of a recipe."""
        return overrides(self.budget, recipe, read_recipe(recipe)["data"]["name"])

    def _sections(self, recipe: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
        sections = read_recipe(recipe)
        for name, value in options.items():
            section, option = name.split(".")
            sections.setdefault(section, {})[option] = value
        return sections

    def _dataset(self, sections: dict[str, dict[str, Any]]) -> Dataset:
        data = DataOptions(**{**sections["data"], "root": self.root})
        key = json.dumps(asdict(data))
        if key not in self._open:
            self._open[key] = open_dataset(data)
        return self._open[key]

    def _images(self, sections: dict[str, dict[str, Any]], weights: str) -> Dataset:
        """The images of an audit. Random weights need no labels: photos of the right size stand in for ImageNet."""
        try:
            return self._dataset(sections)
        except DataError:
            if sections["data"]["name"] != "imagenet" or weights != "random":
                raise
            photos = self._dataset({"data": {"name": "photos", "size": sections["data"].get("size")}})
            classes = tuple(f"class {i}" for i in range(IMAGENET_CLASSES))
            return replace(photos, spec=replace(photos.spec, classes=classes))

    def _trained(self, recipe: str, options: dict[str, Any], seed: int) -> Path:
        """The finished run of a recipe: trained, resumed or found."""
        folder = self._run_folder(recipe, seed)
        if (folder / train.RESULT).is_file():
            _check_run(folder, {**options, "train.seed": seed})
        else:
            self._dataset(self._sections(recipe, options))  # says what is missing before anything is started
            words = [recipe, "--out", str(folder), "--train.seed", str(seed)]
            for name, value in options.items():
                words += [f"--{name}", json.dumps(value) if isinstance(value, list) else str(value)]
            words += ["--data-root", self.root] if self.root else []
            words += ["--resume"] if (folder / "config.yaml").is_file() else []
            if code := train.run(words):
                raise Stopped(code)
        return folder

    def _facts(self, dataset: Dataset, options: dict[str, Any]) -> dict[str, Any]:
        facts = environment()
        # Where things lie on this machine is of no use elsewhere.
        folders = {str(self.results): "results", str(self.runs): "runs", self.root: "DIR"}
        facts["command"] = " ".join(["revit", *(folders.get(word, word) for word in sys.argv[1:])])
        return {
            **facts,
            "options": options,
            "data": dataset.spec.source,
            "data_fingerprint": dataset_fingerprint(dataset),
        }

    def _accuracy(self, experiment: Experiment, options: dict[str, Any], seed: int) -> None:
        folder = self._trained(experiment.recipe, options, seed)
        scores = json.loads((folder / train.RESULT).read_text())
        kept = ("parameters", "epochs", "epoch", "images", "training_seconds", "validation_accuracy", "consistency_percent")
        dataset = self._dataset(self._sections(experiment.recipe, options))
        facts = {**self._facts(dataset, options), **{name: scores[name] for name in kept}}
        facts |= {
            name: scores[name] for name in ("commit", "started", "versions", "threads", "machine", "device")
        }  # of the training
        values = {"accuracy": 100 * scores["accuracy"]}
        write_result(self.results, experiment, self.budget, seed, {**facts, "values": values})

    def _weights(self, recipe: str, options: dict[str, Any], seed: int) -> Path:
        """Where the trained weights of a recipe are: in its run, or in the package if they were trained with these options."""
        accuracy = Experiment(ACCURACY, recipe)
        found, name = read_result(self.results, accuracy, self.budget, seed), shipped_weights(self.budget, recipe, seed)
        trained_here = (self._run_folder(recipe, seed) / "config.yaml").is_file()
        if name is not None and not trained_here and found is not None and found.facts["options"] == options:
            return shipped_folder(name)
        folder = self._trained(recipe, options, seed)
        if found is None:
            self._accuracy(accuracy, options, seed)
        return folder

    def _run_folder(self, recipe: str, seed: int) -> Path:
        return self.runs / self.budget / f"{recipe}-seed{seed}"

    def _equivariance(self, experiment: Experiment, options: dict[str, Any], seed: int) -> None:
        group = Group.parse(str(experiment.group))
        sections = self._sections(experiment.recipe, options)
        dataset = self._images(sections, experiment.weights)
        origin = {}
        if experiment.weights == "trained":
            folder = self._weights(experiment.recipe, options, seed)
            model = load_run(folder).model
            origin = {"weights": folder.name} if folder.name in shipped() else {}
        else:
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the released strides are audited because they are not exact
                model = build_model(ModelOptions(**sections["model"]), dataset.spec)
        x = choose_images(_all(dataset), dataset.spec, SAMPLES)
        fill = normalised_black(dataset.spec)
        label = f"{experiment.recipe}, {experiment.weights} weights, under {group}"
        self.console.print(f"audit of {label}: {len(x):,} images", highlight=False, soft_wrap=True)
        audit = audit_model(model, x, group, fill=fill)
        values = equivariance_values(audit)
        facts = {**self._facts(dataset, options), **origin, "samples": len(x), "audit": audit.to_dict()}
        if turns_at_random(experiment):
            random = random_transformations(model, x, fill=fill)
            facts["random_transformations"] = random.to_dict()
            values["random_consistency"] = random.frame.consistency_percent
            values["random_probability_difference"] = random.frame.probability_difference
        facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        write_result(self.results, experiment, self.budget, seed, {**facts, "values": values})


def _check_run(folder: Path, options: dict[str, Any]) -> None:
    """A finished run is used again only for what it was trained for: budgets may have changed since."""
    trained = read_recipe(folder / "config.yaml")
    for name, value in options.items():
        section, option = name.split(".")
        if (found := trained.get(section, {}).get(option)) != value:
            raise UsageError(
                f"{folder}: was trained with {name} {found}, this budget has {value}; remove it or choose another --runs"
            )


def _all(dataset: Dataset) -> list[Images]:
    """Test images first; where there are fewer than the protocol asks for, the others follow."""
    return [dataset.test, dataset.val, dataset.train]


def equivariance_values(audit: Audit) -> dict[str, Any]:
    """The figures of the paper's tables, [mean, std] over the elements, with the relative ones beside them."""
    values: dict[str, Any] = {}
    for name in ("lift", "pre_class"):
        if name in audit.stages:
            stage = audit.stages[name]
            values[name] = list(stage.over_elements())
            values[f"{name}_relative"] = list(stage.over_elements("relative"))
            values[f"{name}_disc_relative"] = list(stage.over_elements("disc_relative"))
    found = audit.to_dict()
    values["consistency"] = [found["consistency_percent_mean"], found["consistency_percent_std"]]
    exact = [g for g in range(1, len(audit.elements)) if audit.exact[g]]
    if exact:
        values["largest_relative_exact"] = max(stage.relative[g] for stage in audit.stages.values() for g in exact)
    return values


def _print(
    console: Console, table: PaperTable, rows: list[str], results: Path, budget: str, why: dict[Experiment, str]
) -> None:
    """The comparison of one budget on the terminal."""
    labels = {table.rows[row].label for row in rows}
    lines = [line for line in compare(table, results, [budget], why) if line.row in labels]
    shown = Table(
        box=None,
        title=f"Table {table.number} of the paper ({table.name}): {table.title}. Budget {budget}",
        title_justify="left",
    )
    relative = any(line.relative for line in lines)
    columns = ["row", "", "paper", "ours", "difference", *(["relative"] if relative else []), "seeds"]
    for column in columns:
        shown.add_column(column, justify="left" if column in ("row", "") else "right", no_wrap=column in ("row", "ours"))
    for line in lines:
        extra = [line.relative] if relative else []
        shown.add_row(
            line.row, line.column, line.paper, line.ours, line.difference, *extra, str(line.seeds) if line.seeds else ""
        )
    console.print(shown)
    _print_sources(console, lines)
    for row, experiment, _, result in further_lines(table.name, results, [budget]):
        if row in rows:
            worst = result.values.get("largest_relative_exact")
            found = f"largest relative error under exact elements {worst:.1e}" if worst is not None else "no exact elements"
            console.print(
                f"  {experiment.recipe}, {experiment.weights} weights, {experiment.group}: {found}",
                highlight=False,
                soft_wrap=True,
            )


def _print_sources(console: Console, lines: list[Line]) -> None:
    """Where our numbers come from, and why some are not there."""
    for data in dict.fromkeys(line.data for line in lines if line.data):
        console.print(f"  data: {data}", highlight=False, markup=False, soft_wrap=True)
    for why in dict.fromkeys(line.why for line in lines if line.why):
        names = ", ".join(dict.fromkeys(line.row for line in lines if line.why == why))
        console.print(f"  {NOT_OBTAINED}: {names}: {why}", highlight=False, markup=False, soft_wrap=True)
