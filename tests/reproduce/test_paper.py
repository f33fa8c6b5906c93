"""The paper's numbers: whole, consistent with the arithmetic behind them, and refused where they are mistyped."""

import re

import pytest

from revit.groups import Group
from revit.reproduce import PaperValue, paper_tables
from revit.reproduce.paper import parse_tables

TABLES = paper_tables()
ROWS = {"table1": 8, "table2": 6, "table3a": 7, "table3b": 6, "table3c": 8, "table4": 5, "table5": 5, "table6": 5}
ROWS |= {"table7": 12, "table8": 9, "table9": 9, "table10": 7, "table11": 3, "table12": 3, "summary": 4}


def mean(table, row, column):
    return TABLES[table].rows[row].values[column].mean


def cells():
    return [
        (table, row, column, value)
        for table in TABLES.values()
        for row in table.rows.values()
        for column, value in row.values.items()
    ]


def test_every_table_with_all_its_rows():
    assert {name: len(table.rows) for name, table in TABLES.items()} == ROWS
    # As LaTeX counts them: group orders and kernel sizes are 5a and 5b, then the summary, ImageNet, the appendix.
    numbers = ["1", "2", "3a", "3b", "3c", "4", "5a", "5b", "8", "9", "10", "11", "7", "12", "6"]
    assert [table.number for table in TABLES.values()] == numbers
    dashes = 2  # p4m on RotMNIST, twice
    assert len(cells()) == sum(len(table.rows) * len(table.columns) for table in TABLES.values()) - dashes


def test_names_and_words():
    for table in TABLES.values():
        assert table.title and all(table.columns.values())
        assert len({row.label for row in table.rows.values()}) == len(table.rows)
        for row in table.rows.values():
            assert TABLES[table.name].rows[row.name] is row and row.label and row.values
            assert row.note is None or (row.note.endswith(".") and ". " not in row.note)  # one sentence
            assert set(row.parameters) <= set(row.values)
            assert all(re.fullmatch(r"[0-9.]+[KM]", size) for size in row.parameters.values())


def test_only_equivariance_errors_have_a_spread():
    spread = {table.name for table, *_, value in cells() if value.std is not None}
    assert spread == {"table7", "table8", "table9", "table12"}
    assert all((value.std is not None) == (table.name in spread) for table, *_, value in cells())


def test_digits_are_those_of_the_paper():
    assert TABLES["table1"].rows["p4-sa"].values["rotmnist"] == PaperValue(97.3, None, "97.30")
    assert TABLES["table1"].rows["z2-csa"].values["pcam"] == PaperValue(86.4, None, "86.4")
    assert TABLES["table12"].rows["p4m"].values["pre_class"] == PaperValue(0.00008, 0.000034, "0.00008 ± 0.000034")
    assert "rotmnist" not in TABLES["table1"].rows["p4m-csa"].values  # a dash
    assert TABLES["table3a"].rows["p8-csa"].parameters == {"rotmnist": "101.4K"}
    assert TABLES["table11"].rows["revit"].parameters == {"top1": "18M", "top5": "18M"}


def test_multiply_adds_are_affine_in_the_order():
    for family, offset, slope in (("sa", 2.70, 57.45), ("csa", 0, 29.1)):
        for group in ("z2", "p4", "p8"):
            expected = offset + slope * Group.parse(group).order
            assert mean("table2", f"{group}-{family}", "mul_adds") == pytest.approx(expected, rel=2e-3)
    ratios = [mean("table2", f"{g}-sa", "mul_adds") / mean("table2", f"{g}-csa", "mul_adds") for g in ("z2", "p4", "p8")]
    memory = [mean("table2", f"{g}-sa", "memory") / mean("table2", f"{g}-csa", "memory") for g in ("z2", "p4", "p8")]
    assert [round(r, 2) for r in ratios] == [2.07, 2.00, 1.98] and [round(r, 2) for r in memory] == [3.25, 4.51, 2.76]


@pytest.mark.parametrize(("group", "exact", "inexact"), [("p8", 3, 4), ("p12", 3, 8)])
def test_spread_is_over_elements(group, exact, inexact):
    """Elements with an error e and elements without: mean e i/n and std e sqrt(i x)/n, whose ratio is sqrt(x/i)."""
    expected = (exact / inexact) ** 0.5
    names = ["rotmnist-p8", "cifar10-p8"] if group == "p8" else ["rotmnist-p12"]
    for table, column in (("table7", "lift"), ("table7", "pre_class"), ("table9", "pre_class")):
        for name in names:
            value = TABLES[table].rows[name].values[column]
            assert value.std / value.mean == pytest.approx(expected, abs=2.5e-3)


def test_random_transformations_by_hand():
    """Three datasets with p4 and p8, two with p4m, one with p12: the overall numbers are their mean, or should be."""
    weights = {"p4": 3, "p8": 3, "p4m": 2, "p12": 1}
    for column, expected in (("probability_difference", 0.000509), ("consistency", 97.25)):
        total = sum(weight * mean("table10", name, column) for name, weight in weights.items()) / 9
        assert total == pytest.approx(expected, rel=1e-3)
        difference = mean("table10", "overall", column) - mean("table10", "vit", column)
        assert difference == pytest.approx(mean("table10", "difference", column), abs=1e-9)
    assert "97.25" in TABLES["table10"].rows["overall"].note and mean("table10", "overall", "consistency") == 96.99


def test_values_that_stand_in_several_tables():
    same = [
        [("table1", "z2-csa"), ("table3a", "z2-csa"), ("table4", "z2-csa"), ("table5", "z2")],
        [("table1", "p8-csa"), ("table4", "p8-csa")],
        [("table3a", "p4-csa"), ("table5", "p4"), ("table6", "kernel5")],
        [("table3a", "p8-csa"), ("table5", "p8")],
    ]
    for places in same:
        assert len({mean(table, row, "rotmnist") for table, row in places}) == 1
    for group in ("z2", "p4", "p4m"):
        assert mean("table1", f"{group}-csa", "pcam") == mean("table3c", f"{group}-csa", "pcam")


def test_the_summary_repeats_the_full_tables():
    sources = {"lift": ("table7", "lift"), "g-csa": ("table7", "pre_class")}
    sources |= {"g-cnn": ("table9", "pre_class"), "vit": ("table8", "pre_class")}
    cut = set()
    for name, row in TABLES["summary"].rows.items():
        for column, value in row.values.items():
            full = mean(sources[name][0], column, sources[name][1])
            digit = 10.0 ** (int(value.text.split("e")[1]) - 1) if "e" in value.text else 0.0
            assert abs(value.mean - full) <= digit
            if value.mean != float(f"{full:.1e}"):
                cut.add(value.text)
                assert f"{value.text} is cut off" in row.note and f"{full:.6f}" in row.note
    assert cut == {"1.8e-2", "2.0e-2", "3.7e-1"}


def test_known_flaws_have_a_note():
    for name, row in TABLES["table7"].rows.items():
        assert (row.values["lift"].mean == 0) == (row.note is not None and "zero" in row.note), name
    assert "p4" in TABLES["table3b"].rows["z2m-cnn"].note and "92.41" in TABLES["table3b"].rows["p4m-cnn"].note


GOOD = 'number: "1", title: t, columns: {a: A}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "the tables are not YAML: while parsing a flow node"),
        ("7", "tables are given by name, got 7"),
        ("t: 1", "t: expected number, title, columns, rows, got 1"),
        (f"t: {{{GOOD}}}", "t: rows is missing"),
        (f"t: {{{GOOD}, rows: [1]}}", "t: rows are given by name, got [1]"),
        (f"t: {{{GOOD}, rows: {{}}, caption: c}}", "t: unknown key 'caption'; choose number, title, columns, rows"),
        ("t: {number: 1, title: t, columns: {}, rows: {}}", 't.number: write 1 in quotes, "1", so that its digits are kept'),
    ],
)
def test_wrong_tables_are_named(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_tables(text)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("values: {}", "t.r: label is missing"),
        ('label: x, values: {b: "1"}', "t.r: unknown column 'b'; choose a"),
        ('label: x, parameters: {b: 1K}, values: {a: "1"}', "t.r: unknown column 'b'; choose a"),
        ("label: x, values: {a: 97.30}", 't.r.a: write 97.3 in quotes, "97.3", so that its digits are kept'),
        ('label: x, values: {a: "97,3"}', "t.r.a: '97,3' is not a number"),
        ('label: x, values: {a: "nan"}', "t.r.a: 'nan' is not a number"),
        ('label: x, values: {a: ["1", "2", "3"]}', "t.r.a: a value is a number or [mean, std], got ['1', '2', '3']"),
        ('label: x, group: q4, values: {a: "1"}', "t.r: unknown group 'q4'; try z2, z2m, p4"),
        ('label: x, group: C4, values: {a: "1"}', "t.r: group 'C4' is called p4 here"),
        ('label: x, family: CNN, values: {a: "1"}', "t.r: unknown family 'CNN'; choose G-CSA, G-SA, G-CNN"),
        ('label: x, values: {a: "1"}, colour: red', "t.r: unknown key 'colour'; choose label, values, family, group"),
    ],
)
def test_wrong_rows_are_named(row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_tables(f"t: {{{GOOD}, rows: {{r: {{{row}}}}}}}")
