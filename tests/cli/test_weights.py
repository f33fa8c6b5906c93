"""`revit export RUN --format weights`: a finished run as a folder, with a card from its results, which every command takes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from revit import create_model, from_pretrained
from revit.cli import main
from revit.cli.runs import load_run
from revit.cli.subjects import open_subject
from revit.models import model_config
from tests.cli.conftest import png_folder


def test_a_run_becomes_a_folder(run, capsys, tmp_path, monkeypatch):
    assert main(["export", str(run), "--format", "weights", "--out", "weights/revit_toy_p4"]) == 0
    assert "weights/revit_toy_p4: revit_tiny p4" in capsys.readouterr().out
    trained, loaded, x = load_run(run), from_pretrained("weights/revit_toy_p4"), torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded(x), trained.model(x))
    assert loaded.config.data == json.loads(json.dumps(trained.spec.to_dict()))
    card, scores = Path("weights/revit_toy_p4/README.md").read_text(), json.loads((run / "test.json").read_text())
    assert f"| test accuracy | {scores['accuracy']:.2%} |" in card and "| test images | 21 |" in card
    assert "| predictions that stay under the group | 100.00 % |" in card and "dark, bright, striped" in card
    assert "largest relative change of the logits" in card and str(tmp_path) not in card
    monkeypatch.setattr(model_config, "WEIGHTS", Path("weights"))
    assert torch.equal(create_model("revit_toy_p4", pretrained=True)(x), loaded(x))
    assert main(["models", "toy"]) == 0
    assert "with weights in the package (pretrained=True): revit_toy_p4" in capsys.readouterr().out


def test_what_is_no_finished_run(run, fails):
    out = ("--format", "weights", "--out", "weights")
    assert "weights are those of a run folder" in fails("export", "revit_tiny", *out)
    assert "leave --int8 and --checkpoint out" in fails("export", run, *out, "--checkpoint", "last")
    assert "no run with a checkpoint 'best' here" in fails("export", ".", *out)
    (run / "note.txt").write_text("x")
    assert "holds audit.json, which is no part of a model" in fails("export", run, "--format", "weights", "--out", run)
    (run / "test.json").unlink()
    assert "has no test.json, so it has not finished" in fails("export", run, *out)
    assert "which a model card is written from; name a run" in fails("export", run / "checkpoints" / "best", *out)
    assert not Path("weights").exists()


FEW = ["--samples", "8", "--versions", "1", "--angle-images", "1", "--angle-step", "90", "--fail-above", "1e-4"]


@pytest.fixture
def weights(run):
    assert main(["export", str(run), "--format", "weights", "--out", "weights/revit_toy_p4"]) == 0
    return Path("weights/revit_toy_p4")


def test_weights_are_used_as_a_run_is(run, trained, weights, monkeypatch):
    """By their folder, and by their name if they come with the package: the same predictions and scores."""
    files, data = sorted(weights.iterdir()), ("--data-root", str(trained.parent))
    png_folder(Path("images"))
    assert main(["eval", str(run)]) == 0
    expected = json.loads((run / "eval_test" / "scores.json").read_text())
    for name in (str(weights), weights.name):
        if name == weights.name:
            monkeypatch.setattr(model_config, "WEIGHTS", weights.parent.resolve())
        for subject in (str(run), name):
            assert main(["predict", "images", "--run", subject, "--out", f"{Path(subject).name}.csv", "--agreement"]) == 0
        assert Path("one.csv").read_text() == Path("revit_toy_p4.csv").read_text()
        assert main(["eval", name, *data]) == 0
        scores = json.loads(Path("eval_test/revit_toy_p4/scores.json").read_text())
        assert scores["confusion"] == expected["confusion"] and scores["epoch"] is None
        assert main(["audit", name, *data, *FEW]) == 0
        audit = json.loads(Path("audit/revit_toy_p4/audit.json").read_text())
        assert audit["audit"]["group"] == "p4" and audit["subject"] == name and "toy.npz" in audit["data"]
        assert sorted(weights.iterdir()) == files
        shutil.rmtree("audit")
    run_of, subject = load_run(weights), open_subject(str(weights), in_chans=3, num_classes=2)
    assert subject.run is not None and subject.spec == run_of.spec == load_run(run).spec


def test_weights_that_do_not_say_what_their_images_are(fails, weights):
    """They can be audited with images that are named, and nothing else."""
    plain = Path("plain")
    create_model("revit_tiny", group="p4", dims=4, depths=1, num_heads=1, in_chans=3).save_pretrained(plain)
    png_folder(Path("images"))
    assert "plain: its config.json does not say the classes of its images" in fails(
        "predict", "images", "--run", plain, "--out", "p.csv"
    )
    assert "plain: its config.json does not say the classes of its images" in fails("eval", plain)
    assert main(["audit", str(plain), "--images", "images", "--size", "12", *FEW]) == 0
    for command in (["eval", weights], ["audit", weights], ["predict", "images", "--out", "p.csv", "--run", weights]):
        assert "weights have no checkpoint 'last'" in fails(*command, "--checkpoint", "last")
    assert "already a folder of weights" in fails("export", weights, "--format", "weights", "--out", "again")
    (weights / "model.safetensors").unlink()
    for command in (["eval", weights], ["audit", weights], ["predict", "images", "--out", "p.csv", "--run", weights]):
        assert "model.safetensors: cannot be read" in fails(*command)
    (weights / "config.json").write_text("{")
    assert "config.json: damaged" in fails("eval", weights)
    assert not Path("p.csv").exists() and not Path("again").exists()
