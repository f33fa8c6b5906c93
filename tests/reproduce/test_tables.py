"""Tables are made of result files alone: what is there is compared, what is not is said to be missing."""

import json
import re

import pytest
import yaml

from revit.reproduce.document import accuracies, headline, results_page
from revit.reproduce.gallery import our_points
from revit.reproduce.paper import paper_tables
from revit.reproduce.plan import ACCURACY, EQUIVARIANCE, Experiment, cells
from revit.reproduce.ranking import rankings, verdict
from revit.reproduce.results import ResultError, read_result, write_result
from revit.reproduce.tables import NOT_OBTAINED, compare, find_table, further_lines

FACTS = {
    "options": {}, "data": "made up", "data_fingerprint": "abc", "command": "revit reproduce x", "commit": "1234567",
    "versions": {"torch": "2"}, "parameters": 44282, "epochs": 3, "training_seconds": 12.0, "samples": 1024,
}  # fmt: skip


def keep(folder, experiment, budget, seed, values, **more):
    return write_result(folder, experiment, budget, seed, {**FACTS, **more, "values": values})


def line_of(lines, row, column="rotmnist", table="table1"):
    heading = paper_tables()[table].columns[column]
    return next(line for line in lines if line.row == row and line.column == heading)


def test_nothing_was_obtained_from_nothing(tmp_path):
    lines = compare(paper_tables()["table1"], tmp_path)
    assert len(lines) == 14 and {line.ours for line in lines} == {NOT_OBTAINED}
    assert line_of(lines, "p4-CSA").paper == "97.48" and not line_of(lines, "p4-CSA").why


def test_mean_spread_difference_and_seeds(tmp_path):
    for seed, accuracy in enumerate((97.0, 98.0, 98.2)):
        keep(tmp_path, Experiment(ACCURACY, "rotmnist_p4_44k"), "cpu", seed, {"accuracy": accuracy})
    line = line_of(compare(paper_tables()["table1"], tmp_path), "p4-CSA")
    assert (line.ours, line.difference, line.seeds, line.budget) == ("97.73 ± 0.64", "+0.25", 3, "cpu")
    assert line.data == "made up"


def test_the_largest_budget_counts_and_budgets_are_not_mixed(tmp_path):
    experiment = Experiment(ACCURACY, "rotmnist_p4_44k")
    keep(tmp_path, experiment, "smoke", 0, {"accuracy": 60.0})
    keep(tmp_path, experiment, "cpu", 0, {"accuracy": 97.0})
    table = paper_tables()["table1"]
    assert line_of(compare(table, tmp_path), "p4-CSA").ours == "97.00"
    assert line_of(compare(table, tmp_path, ["smoke"]), "p4-CSA").ours == "60.00"
    assert line_of(compare(table, tmp_path, ["full"]), "p4-CSA").ours == NOT_OBTAINED


def test_the_budget_that_has_most_rows_of_a_column_goes_before_the_others(tmp_path):
    table = paper_tables()["table6"]
    recipes = [cell.experiments[0] for cell in cells(table)]
    for experiment in recipes:
        keep(tmp_path, experiment, "smoke", 0, {"accuracy": 50.0})
    keep(tmp_path, recipes[1], "cpu", 0, {"accuracy": 99.0})
    for experiment in recipes[:-1]:
        keep(tmp_path, experiment, "short", 0, {"accuracy": 98.0})
    assert [line.budget for line in compare(table, tmp_path)] == ["short"] * 4 + ["smoke"]
    keep(tmp_path, recipes[-1], "cpu", 0, {"accuracy": 97.0})
    assert [line.ours for line in compare(table, tmp_path)] == ["98.00"] * 4 + ["97.00"]
    for experiment in recipes:
        keep(tmp_path, experiment, "cpu", 0, {"accuracy": 99.0})
    assert [line.budget for line in compare(table, tmp_path)] == ["cpu"] * 5
    assert [line.ours for line in compare(table, tmp_path, ["smoke"])] == ["50.00"] * 5


def test_errors_keep_their_digits_and_rounding_is_not_zero(tmp_path):
    values = {
        "lift": [3.2e-9, 1e-9], "lift_relative": [1e-7, 0.0], "pre_class": [0.0123456, 0.0004], "consistency": [99.5, 0.25],
        "largest_relative_exact": 4e-7,
    }  # fmt: skip
    keep(tmp_path, Experiment(EQUIVARIANCE, "rotmnist_p4", "p4"), "smoke", 0, values)
    lines = [line for line in compare(paper_tables()["table7"], tmp_path) if line.row == "RotMNIST, p4"]
    assert [line.ours for line in lines] == ["3.2e-09 ± 1.0e-09", "0.012346 ± 0.000400", "99.50 ± 0.25"]
    assert lines[0].relative == "1.0e-07" and lines[1].difference == "+0.012331"
    keep(tmp_path, Experiment(EQUIVARIANCE, "pcam_p4_released", "p4", "random"), "smoke", 0, values)
    ((row, experiment, budget, result),) = further_lines("table7", tmp_path)
    assert row == "pcam-ds2-p4" and (experiment.recipe, budget, result.values["largest_relative_exact"]) == (
        "pcam_p4_released",
        "smoke",
        4e-7,
    )


def test_table_10_is_a_mean_over_datasets_and_needs_all_of_them(tmp_path):
    def audit(recipe, group, consistency):
        values = {"random_consistency": consistency, "random_probability_difference": consistency / 1e5}
        keep(tmp_path, Experiment(EQUIVARIANCE, recipe, group), "smoke", 0, values)

    table = paper_tables()["table10"]
    for recipe, consistency in (("rotmnist_p4", 90.0), ("cifar10_p4", 95.0)):
        audit(recipe, "p4", consistency)
    assert line_of(compare(table, tmp_path), "p4-CSA", "consistency", "table10").ours == NOT_OBTAINED
    audit("pcam_p4", "p4", 100.0)
    assert line_of(compare(table, tmp_path), "p4-CSA", "consistency", "table10").ours == "95.00"
    for recipe, group in (("rotmnist_p8", "p8"), ("cifar10_p8", "p8"), ("pcam_p8", "p8"), ("cifar10_p4m", "p4m"),
                          ("pcam_p4m", "p4m"), ("rotmnist_p12", "p12")):  # fmt: skip
        audit(recipe, group, 95.0)
    for recipe in ("rotmnist_vit", "cifar10_vit", "pcam_vit"):
        audit(recipe, "p4", 80.0)
    lines = compare(table, tmp_path)
    assert line_of(lines, "all of REViT", "consistency", "table10").ours == "95.00"
    assert line_of(lines, "REViT minus ViT", "consistency", "table10").ours == "15.00"


def test_rows_beside_a_table_have_a_difference_where_the_paper_has_a_number(tmp_path):
    for recipe in ("rotmnist_p4_sa", "rotmnist_p4_resnet"):
        keep(tmp_path, Experiment(ACCURACY, recipe), "smoke", 0, {"accuracy": 95.0})
    (table,) = find_table("table4")
    lines = {line.row: (line.paper, line.ours, line.difference) for line in compare(table, tmp_path) if line.results}
    assert lines == {"p4-SA (Table 1)": ("97.30", "95.00", "-2.30"), "RE-ResNet p4 (not in the paper)": ("-", "95.00", "")}


def test_result_files_are_checked(tmp_path):
    experiment = Experiment(ACCURACY, "rotmnist_p4")
    with pytest.raises(ResultError, match="not a result file, it has no data, data_fingerprint"):
        facts = {key: value for key, value in FACTS.items() if not key.startswith("data")}
        write_result(tmp_path, experiment, "cpu", 0, {**facts, "values": {}})
    assert read_result(tmp_path, experiment, "cpu", 0) is None and not list(tmp_path.iterdir())
    written = keep(tmp_path, experiment, "cpu", 0, {"accuracy": 1.0})
    assert read_result(tmp_path, experiment, "cpu", 0).facts == written.facts
    assert {"kind", "recipe", "budget", "seed", "command", "commit"} <= set(json.loads(written.path.read_text()))
    written.path.write_text("{")
    with pytest.raises(ResultError, match=f"{re.escape(str(written.path))}: cannot be read .*; delete it and run again"):
        read_result(tmp_path, experiment, "cpu", 0)


def test_names_of_tables():
    assert [table.name for table in find_table("table3")] == ["table3a", "table3b", "table3c"]
    assert [table.name for table in find_table("table1")] == ["table1"] and find_table("table13") == []


def test_the_page_says_what_is_there_and_what_is_not(tmp_path):
    keep(tmp_path, Experiment(ACCURACY, "rotmnist_p4_44k"), "cpu", 0, {"accuracy": 97.9})
    values = {"lift": [1e-8, 0.0], "pre_class": [1e-8, 0.0], "consistency": [100.0, 0.0], "largest_relative_exact": 2e-7}
    keep(tmp_path, Experiment(EQUIVARIANCE, "pcam_p4", "p4"), "smoke", 0, values)
    page = results_page(tmp_path)
    assert "| p4-CSA | RotMNIST accuracy (%) | 97.48 | 97.90 | +0.42 | 1 | cpu |" in page
    assert "Not obtained: Z2-SA, p4-SA, p8-SA, p4m-SA, Z2-CSA" in page
    assert "made up (abc)" in page and "run `revit reproduce table2`" in page
    assert "`revit reproduce x`, seed 0, commit 1234567" in page
    assert "| PCam, halved, p4 | 0.042795 ± 0.005889 | 1.0e-08 ± 0.000000 |" in headline(tmp_path)
    (point,) = our_points(tmp_path)
    assert (point.family, point.group, point.rotmnist, point.pcam, point.ours) == ("G-CSA", "p4", 97.9, None, True)


def test_accuracies_of_long_trainings_with_what_they_took(tmp_path):
    command = "revit reproduce table1 --rows p4-csa --budget cpu --results somewhere --runs else"
    for seed, minutes in enumerate((20, 21)):
        facts = {"command": command, "training_seconds": 60.0 * minutes, "epochs": 30}
        keep(tmp_path, Experiment(ACCURACY, "rotmnist_p4_44k"), "cpu", seed, {"accuracy": 98.0 + seed}, **facts)
    keep(tmp_path, Experiment(ACCURACY, "rotmnist_z2"), "short", 0, {"accuracy": 90.0})
    assert accuracies(tmp_path).splitlines()[2:] == [
        "| p4-CSA | RotMNIST | 44,282 | 97.48 | 98.50 ± 0.71 | 2 | 30 | 20 and 21 |"
        " `revit reproduce table1 --rows p4-csa --budget cpu` |",
        "",
        "Images that stand for RotMNIST: made up.",
    ]


def test_rows_of_one_budget_are_ranked_and_it_is_said_who_is_behind(tmp_path):
    trained = {"z2": 90.0, "p4m": 92.0, "z2m": 89.5, "p4m_cnn": 92.5, "z2_cnn": 91.0}
    for name, accuracy in trained.items():
        facts = {"images": 2000, "validation_accuracy": 0.935, "consistency_percent": 100.0 if name == "p4m" else None}
        keep(tmp_path, Experiment(ACCURACY, f"cifar10_{name}"), "short", 0, {"accuracy": accuracy}, **facts)
    keep(tmp_path, Experiment(ACCURACY, "cifar10_z2"), "cpu", 0, {"accuracy": 95.0})  # alone in its budget
    keep(tmp_path, Experiment(ACCURACY, "pcam_z2"), "short", 0, {"accuracy": 95.0})  # nothing to compare with
    found = rankings(tmp_path)
    assert list(found) == ["CIFAR-10"]
    budget, rows = found["CIFAR-10"]
    assert budget == "short" and [row.row for row in rows] == ["p4m-CNN", "p4m-CSA", "Z2-CNN", "Z2-CSA", "Z2m-CSA"]
    assert rows[1].consistency == 100.0 and rows[1].error == pytest.approx(100 * (0.92 * 0.08 / 2000) ** 0.5)
    assert verdict(rows) == (
        "Ahead of Z2-CSA: p4m-CSA (+2.00). Not ahead of it: Z2m-CSA (-0.50). "
        "Behind the best REViT (p4m-CSA, 44,282 parameters): Z2-CNN (-1.00). Not behind it: p4m-CNN (+0.50)."
    )
    page = results_page(tmp_path)
    assert "### CIFAR-10, budget `short`\n\nImages: made up\n" in page and verdict(rows) in page
    assert "| p4m-CSA | 44,282 | 3 | 1 | 92.00 | 0.61 | 93.50 | 100.00 |" in page


def test_the_page_shows_the_trials_that_choices_rest_on(tmp_path):
    assert "## Choices" not in results_page(tmp_path)
    (tmp_path / "trials").mkdir()
    trial = {
        "validation_accuracy": 0.9845, "parameters": 94676, "epochs": 30, "training_seconds": 1800.0, "threads": 1, "seed": 0,
        "commit": "1234567", "command": "revit train rotmnist_p4_fast --data-root DIR --no-test",
    }  # fmt: skip
    (tmp_path / "trials" / "turned.json").write_text(json.dumps(trial))
    (tmp_path / "trials" / "bent.json").write_text(json.dumps({**trial, "epochs": 16, "epochs_planned": 30}))
    asked = [{"question": "Bend the images?", "answer": "No.", "runs": {"turned": "turned only", "bent": "bent too"}}]
    (tmp_path / "trials.yaml").write_text(yaml.safe_dump(asked))
    page = results_page(tmp_path)
    assert "### Bend the images?" in page and "\nNo.\n" in page
    assert "| bent too | 98.45 | 94,676 | 16 of 30, stopped |" in page
    assert "| turned only | 98.45 | 94,676 | 30 | 30 | 1 | 0 | 1234567 | `revit train rotmnist_p4_fast --data-root DIR" in page
