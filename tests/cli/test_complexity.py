"""`revit benchmark complexity`: what it prints, what it writes, and how it fails."""

import json
from pathlib import Path

import pytest

from revit.cli import complexity, main
from revit.evaluation.memory import in_fresh_process
from revit.models.budget import count_parameters
from tests.evaluation.conftest import one_thread as one_thread
from tests.evaluation.test_figures import check_png

SMALL = ["--batch-size", "2", "--rounds", "1", "--parameters", "3000"]


def test_rows_table_and_picture(capsys, monkeypatch):
    monkeypatch.setattr(complexity, "ATTENTIONS", ("spatial", "joint"))
    monkeypatch.setattr(complexity, "PROJECTIONS", ("full",))
    monkeypatch.setattr(complexity, "in_fresh_process", lambda function, *arguments: function(*arguments))
    words = ["benchmark", "complexity", "--groups", "[z2,C4]", "--size", "6", *SMALL, "--out", "c.json", "--plot", "c.png"]
    assert main(words) == 0
    report = json.loads(Path("c.json").read_text())
    assert report["size"] == 6 and report["batch_size"] == 2 and report["threads"] <= 2 and "torch" in report["versions"]
    rows = report["rows"]
    assert [(row["group"], row["order"], row["attention"]) for row in rows] == [
        ("z2", 1, "spatial"), ("z2", 1, "joint"), ("p4", 4, "spatial"), ("p4", 4, "joint"),
    ]  # fmt: skip
    for row in rows:
        assert row["parameters"] <= 3000
        assert row["convolution_macs"] == row["counted_convolution_macs"]
        tokens, fields = 36, row["dims"] * 4  # four layers
        assert row["attention_macs"] == row["counted_attention_macs"] > 0
        assert row["attention_macs"] == 2 * tokens**2 * fields * row["order"] ** (2 if row["attention"] == "joint" else 1)
        assert row["forward_seconds"] > 0 and row["step_seconds"] > 0 and row["step_bytes"] >= 0
        assert row["paper_mul_adds_m"] is None  # of another size
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("revit") for line in lines) == 4
    Path("picture").mkdir()
    check_png(Path("c.png").rename("picture/c.png"))


def test_other_models_and_what_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(complexity, "in_fresh_process", lambda function, *arguments: 2**20)
    words = ["benchmark", "complexity", "--groups", "[p4,p3m]", "--models", "[revit_tiny,revit_tiny_paper]", "--size", "28"]
    assert main([*words, *SMALL, "--parameters", "15000", "--out", "c.json"]) == 0
    rows = json.loads(Path("c.json").read_text())["rows"]
    names = [(row["model"], row["group"]) for row in rows]
    assert ("revit_tiny", "p4") in names and all(row["attention"] is None for row in rows)
    assert all(10000 < row["parameters"] <= 15000 for row in rows)
    assert all(row["counted_attention_macs"] == row["attention_macs"] for row in rows)
    printed = capsys.readouterr().out
    assert "projection" not in printed  # no row has one
    assert ("left out: revit_tiny_paper p4: " in printed) == (("revit_tiny_paper", "p4") not in names)


@pytest.mark.parametrize(("group", "mul_adds", "memory"), [("z2", 29.10, 9.09), ("p4", 116.37, 35.84), ("p8", 232.98, 71.72)])
def test_the_figures_of_the_paper_stand_beside_its_configuration(group, mul_adds, memory):
    row = {"model": "revit", "group": group, "attention": "spatial", "projection": "full"}
    assert complexity._paper_figures(row, 28) == {"paper_mul_adds_m": mul_adds, "paper_memory_mb": memory}
    for other in ({"attention": "joint"}, {"projection": "separable"}, {"group": "p12"}, {"model": "revit_tiny"}):
        assert complexity._paper_figures(row | other, 28)["paper_mul_adds_m"] is None
    assert complexity._paper_figures(row | {"model": "gsa_rotmnist"}, 28)["paper_mul_adds_m"] > 1.9 * mul_adds


def test_a_configuration_can_be_sent_to_another_process():
    configuration = complexity.Configuration("revit", "p4", {"attention": "joint", "dims": 2})
    here = complexity._peak(configuration, "step", 16, 16)
    assert in_fresh_process(complexity._peak, configuration, "step", 16, 16) > max(here // 2, 2**20)


def test_widths_are_matched():
    """The paper's 44,282 parameters at z2; as many as fit at p4."""
    options = {"attention": "spatial", "projection": "full"}
    for group, dims, parameters in (("z2", 16, 44282), ("p4", 8, 43622)):
        matched = complexity.Configuration("revit", group, options).matched(44300)
        assert matched.arguments["dims"] == dims and count_parameters(matched.build()) == parameters


WRONG = [
    (["--groups", "[q4]"], "q4"),
    (["--models", "[revit_huge]"], "unknown model 'revit_huge'; did you mean"),
    (["--models", "[]"], "--groups and --models must name at least one each"),
    (["--batch-size", "1"], "size, parameters and rounds must be at least 1, the batch size at least 2"),
    (["--rounds", "0"], "size, parameters and rounds must be at least 1, the batch size at least 2"),
    (
        ["--parameters", "10", "--groups", "[z2]"],
        "revit z2 spatial full: no width fits 10 parameters: the narrowest, dims=1, has ",
    ),
    (
        ["--groups", "[z2]", "--limit", "0.1"],
        "revit z2 spatial full: takes 0.146 x 10^9 multiply-adds an image; raise --limit 0.1",
    ),
    (["--colour", "red"], "unknown option --colour"),
    (["--size", "big"], "--size: "),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_options_get_one_clear_line(fails, words, message):
    assert message in fails("benchmark", "complexity", *words)


def test_the_dispatcher(fails, capsys):
    assert "complexity|data|plan is missing" in fails("benchmark")
    assert "speed" in fails("benchmark", "speed")
    for words in (["data"], ["complexity"], ["plan"], []):
        with pytest.raises(SystemExit) as end:
            main(["benchmark", *words, "--help"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(" ".join(["usage: revit benchmark", *words]))
