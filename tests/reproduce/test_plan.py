"""Every cell of the paper's tables has something to run; budgets change recipes in ways that exist."""

import pytest

from revit.data.augment import AugmentOptions
from revit.data.spec import DataOptions
from revit.models import create_model
from revit.models.model_config import read_config, shipped_folder
from revit.reproduce.paper import paper_tables
from revit.reproduce.plan import (
    BUDGETS,
    EQUIVARIANCE,
    Experiment,
    cells,
    further,
    overrides,
    own_group,
    seeds,
    shipped_weights,
    turns_at_random,
    with_rows_beside,
)
from revit.training.recipe import ModelOptions, TrainOptions, list_recipes, read_recipe

TABLES = [with_rows_beside(t) for name, t in paper_tables().items() if name.startswith("table") and name != "table2"]
RECIPES = sorted(
    {e.recipe for t in TABLES for e in [*(e for c in cells(t) for e in c.experiments), *(e for _, e in further(t.name))]}
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_number_of_the_paper_is_planned(table):
    found = cells(table)
    assert {(cell.row, cell.column) for cell in found} == {(r.name, c) for r in table.rows.values() for c in r.values}
    for cell in found:
        assert cell.experiments and cell.value, cell


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_exist_and_are_of_their_row(recipe):
    assert recipe in list_recipes()
    for table in TABLES:
        for cell in cells(table):
            row = table.rows[cell.row]
            if [e.recipe for e in cell.experiments] == [recipe] and row.group and row.family != "ViT":
                assert read_recipe(recipe)["model"]["group"] == row.group, (table.name, cell.row)


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_change_options_that_exist(budget):
    known = {"model": ModelOptions, "data": DataOptions, "augment": AugmentOptions, "train": TrainOptions}
    for recipe in RECIPES:
        sections = read_recipe(recipe)
        for name, value in overrides(budget, recipe, sections["data"]["name"]).items():
            section, option = name.split(".")
            sections.setdefault(section, {})[option] = value
        options = {section: known[section](**values) for section, values in sections.items()}  # raises for unknown options
        if budget == "smoke" and "imagenet" not in recipe:
            create_model(options["model"].name, in_chans=3, num_classes=2, **options["model"].arguments())
    assert seeds(budget) >= 1


def test_full_is_the_recipes_as_they_are():
    assert all(not overrides("full", recipe, read_recipe(recipe)["data"]["name"]) for recipe in RECIPES)
    assert seeds("full") >= 3


def test_short_is_cpu_with_as_many_epochs_for_all_recipes_of_a_dataset():
    epochs = {"rotmnist": 6, "cifar10": 6, "pcam": 8, "imagenet": 6}
    own = {"rotmnist_p8": {"train.lr": 0.003}, "pcam_p4_sa": {"train.epochs": 1}}  # told in the plan
    for recipe in RECIPES:
        dataset = read_recipe(recipe)["data"]["name"]
        expected = overrides("cpu", recipe, dataset) | {"train.epochs": epochs[dataset]} | own.get(recipe, {})
        assert overrides("short", recipe, dataset) == expected


def test_what_a_recipe_says_goes_before_what_its_dataset_says():
    assert overrides("smoke", "rotmnist_vit", "rotmnist")["augment.rotate"] == 0
    assert overrides("smoke", "rotmnist_p4", "rotmnist")["augment.rotate"] == 180
    assert overrides("smoke", "rotmnist_p4", "rotmnist")["train.epochs"] == 4


def test_table_10_has_the_nine_pairs_of_dataset_and_group():
    rows = {cell.row: cell for cell in cells(paper_tables()["table10"]) if cell.column == "consistency"}
    overall = [(e.recipe.split("_")[0], e.group) for e in rows["overall"].experiments]
    assert len(set(overall)) == 9 and overall.count(("rotmnist", "p12")) == 1
    assert [e.group for e in rows["p4m"].experiments] == ["p4m", "p4m"]
    assert len(rows["difference"].experiments) == 12


def test_audits_have_the_other_weights_and_the_released_strides():
    found = [experiment for _, experiment in further("table7")]
    assert {e.weights for e in found} == {"random"} and {"pcam_p4_released", "pcam_p4m_released"} < {e.recipe for e in found}
    assert {e.weights for _, e in further("table12") if "released" not in e.recipe} == {"trained"}
    assert further("table1") == []


def test_random_turns_are_measured_where_table_10_needs_them():
    assert turns_at_random(Experiment(EQUIVARIANCE, "rotmnist_vit", "p4"))
    assert not turns_at_random(Experiment(EQUIVARIANCE, "rotmnist_vit", "p8"))
    assert not turns_at_random(Experiment(EQUIVARIANCE, "rotmnist_p4", "p4", "random"))
    assert not turns_at_random(Experiment(EQUIVARIANCE, "pcam_p4_ds1", "p4"))


def test_table_4_also_has_the_other_baselines_with_the_numbers_of_their_tables():
    rows = with_rows_beside(paper_tables()["table4"]).rows
    assert list(rows)[:5] == list(paper_tables()["table4"].rows)
    assert {rows[name].label for name in list(rows)[5:]} == {
        "p4-SA (Table 1)", "p4-CNN (Table 3a)", "α-p4-CNN (Table 3a)", "RE-ResNet p4 (not in the paper)",
        "p4-CSA on 7 x 7 positions, at the cost of the p4-CNN (not in the paper)",
    }  # fmt: skip
    assert rows["p4-sa"].values["rotmnist"].text == "97.30" and rows["re-resnet"].values["rotmnist"].text == "-"
    assert with_rows_beside(paper_tables()["table5"]) == paper_tables()["table5"]


def test_names_of_result_files():
    assert Experiment("accuracy", "rotmnist_p4").file_name("cpu", 2) == "accuracy-rotmnist_p4-cpu-seed2.json"
    audit = Experiment(EQUIVARIANCE, "rotmnist_vit", "p8", "random")
    assert audit.file_name("smoke", 0) == "equivariance-rotmnist_vit-p8-random-smoke-seed0.json"
    assert own_group("pcam_p4m") == "p4m"
    with pytest.raises(ValueError, match="no equivariance table has a row for demo"):
        own_group("demo")


def test_weights_of_the_package_are_those_of_their_recipes():
    """Every option of the model that the budget or the recipe gives, and the digits that it was trained on."""
    for recipe in ("rotmnist_p4", "rotmnist_p4_44k", "rotmnist_p8", "rotmnist_p8_44k"):
        config = read_config(shipped_folder(shipped_weights("cpu", recipe, 0)))
        changes = {name.removeprefix("model."): value for name, value in overrides("cpu", recipe, "rotmnist").items()}
        expected = {
            **read_recipe(recipe)["model"],
            **{name: changes[name] for name in ModelOptions().__dict__ if name in changes},
        }
        assert config.model == expected.pop("name") and config.data["name"] == "rotmnist"
        off = dict.fromkeys(["smooth_strides"], False)  # not an option yet when the first of them were trained
        assert {name: (off | config.options)[name] for name in expected} == expected
    assert shipped_weights("cpu", "rotmnist_p4", 1) is None and shipped_weights("smoke", "rotmnist_p4", 0) is None
