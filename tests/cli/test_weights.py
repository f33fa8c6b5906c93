"""`revit export RUN --format weights`: a finished run as a folder, with a card from its results."""

import json
from pathlib import Path

import torch

from revit import create_model, from_pretrained
from revit.cli import main
from revit.cli.runs import load_run
from revit.models import model_config


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
    assert not Path("weights").exists()
