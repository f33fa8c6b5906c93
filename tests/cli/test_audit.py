"""`revit audit` as people use it: on runs, on models by name, on their own modules and files, in CI."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from revit.cli import main
from tests.cli.conftest import png_folder
from tests.cli.test_commands import toy_files

FEW = ["--samples", "8", "--versions", "2", "--angle-images", "2", "--angle-step", "60"]
PICTURES = {"stage_errors.png", "errors_by_angle.png", "turning_features.png", "turning_features.gif", "attention.png"}
MODULE = """
import torch
from torch import nn

class Brightness(nn.Module):
    def forward(self, x):
        mean = x.mean((1, 2, 3))
        return torch.stack((mean, -mean), 1)

def invariant():
    return Brightness()

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
"""


def audit_of(folder):
    return json.loads((Path(folder) / "audit.json").read_text())


def test_a_run_is_audited_on_its_own_images(run, capsys):
    assert main(["audit", str(run), *FEW, "--fail-above", "1e-4"]) == 0
    folder = run / "audit"
    assert {path.name for path in folder.iterdir()} == {"audit.json", "report.html", *PICTURES}
    found = audit_of(folder)
    assert found["audit"]["passed"] and found["audit"]["group"] == "p4" and found["audit"]["samples"] == 8
    assert list(found["audit"]["stages"]) == ["lift", "pre_class", "logits"]
    assert found["audit"]["stages"]["lift"]["relative_mean"] < 1e-6 and "toy.npz" in found["data"]
    assert len(found["by_angle"]["degrees"]) == 6 and found["random_transformations"]["versions"] == 2
    assert found["command"] and found["commit"] and found["versions"]
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 4 and "data:image/gif;base64," in page and "<script" not in page
    printed = capsys.readouterr().out
    assert "100.00 ± 0.00 % of predictions are the same under the 3 turns of p4" in printed
    assert "random turns and mirrors, central disc" in printed and "lift" in printed


def test_more_images_than_the_test_split_has_come_from_the_others(run):
    assert main(["audit", str(run), *FEW, "--samples", "40", "--out", "a"]) == 0
    assert audit_of("a")["audit"]["samples"] == 40  # 21 test, 12 validation, 7 of training


def test_a_wrong_group_fails_the_command(run, capsys):
    assert main(["audit", str(run), *FEW, "--group", "p4m", "--fail-above", "1e-4", "--out", "a"]) == 1
    assert "failed: logits has a largest error of" in capsys.readouterr().out
    assert main(["audit", str(run), *FEW, "--group", "p4m", "--out", "a"]) == 0  # without a limit it reports
    assert audit_of("a")["audit"]["broken_stage"] == "logits"


def test_models_by_name_and_files_without_labels(tmp_path, capsys):
    png_folder(tmp_path / "photos", size=(20, 24))
    words = [
        "audit",
        "revit_tiny",
        "--model.group",
        "z2m",
        "--model.dims",
        "4",
        "--model.num_heads",
        "1",
        "--model.depths",
        "1",
    ]
    assert main([*words, "--images", str(tmp_path / "photos"), "--size", "16", *FEW]) == 0
    found = audit_of("audit/revit_tiny-z2m-untrained")
    assert found["audit"]["passed"] and found["size"] == [16, 16] and found["audit"]["group"] == "z2m"
    assert "image files photos" in capsys.readouterr().out


def test_any_module_of_yours(run, monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine.py").write_text(MODULE)
    toy_files(tmp_path / "toys")
    images = ["--images", str(tmp_path / "toys"), "--size", "12", "--channels", "1", *FEW]
    assert main(["audit", "mine:invariant", *images, "--fail-above", "1e-4", "--out", "a"]) == 0
    assert audit_of("a")["audit"]["passed"] and not (Path("a") / "attention.png").exists()
    assert main(["audit", "mine:plain", *images, "--group", "p4", "--fail-above", "1e-4", "--out", "b"]) == 1
    assert audit_of("b")["audit"]["broken_stage"] == "0"  # its first convolution
    assert "0 <- breaks" in capsys.readouterr().out
    scripted = torch.jit.trace(nn.Sequential(nn.AvgPool2d(12), nn.Flatten(), nn.Linear(1, 2)), torch.zeros(1, 1, 12, 12))
    scripted.save("exported.pt")
    assert main(["audit", "exported.pt", *images, "--fail-above", "1e-4", "--out", "c"]) == 0
    assert list(audit_of("c")["audit"]["stages"]) == ["logits"]


test_any_module_of_yours = pytest.mark.filterwarnings("ignore::DeprecationWarning")(test_any_module_of_yours)


def test_wrong_uses_are_one_line(run, fails, tmp_path):
    assert "RUN|MODEL is missing" in fails("audit")
    assert "--samples must be at least 1, got 0" in fails("audit", run, "--samples", 0)
    assert "--fail-above is an error of 0 or more, got -1.0" in fails("audit", run, "--fail-above", -1)
    assert "unknown group 'q4'" in fails("audit", run, "--group", "q4")
    assert "revit_tiny" in fails("audit", "revit_tinny")
    Path("theirs.py").write_text("from torch import nn\nnet = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())\n")
    toy_files(tmp_path / "toys")
    line = fails("audit", "theirs:net", "--images", tmp_path / "toys", "--size", 12, "--channels", 1)
    assert (
        "theirs:net: fails on an image of 1 channels and 12 x 12 pixels" in line and "--images, --size and --channels" in line
    )
    assert not Path("audit").exists()
    assert "no such" in fails("audit", run, "--images", tmp_path / "none").lower()


def test_an_onnx_file_says_which_images_it_takes(tmp_path):
    pytest.importorskip("onnxruntime", reason="comes with the extra [export]")
    from tests.cli.test_onnx_subjects import onnx_file

    onnx_file(shape=("n", 3, 12, 12))
    toy_files(tmp_path / "toys")
    assert main(["audit", "net.onnx", "--images", str(tmp_path / "toys"), *FEW, "--group", "p4", "--out", "a"]) == 0
    found = audit_of("a")
    assert found["size"] == [12, 12] and list(found["audit"]["stages"]) == ["logits"] and found["subject"] == "net.onnx"
