"""`revit convert`: from a file of the released code to a folder that the other commands take."""

import pytest
import torch

from revit.cli import main
from revit.cli.runs import load_run
from revit.training.checkpoint import read_checkpoint
from tests.conversion.released_states import make_model, released_state


@pytest.fixture
def flat(tmp_path):
    """A rotated-digit model, as the released training code saves it, and the model itself."""
    model = make_model("p4", in_chans=1, num_classes=10, dtype=torch.float32)
    path = tmp_path / "rotmnist_C4_2_4_2_17"
    torch.save({"epoch": 17, "model_state_dict": released_state(model, evaluated=True), "loss": 0.1}, path)
    return path, model


@pytest.mark.filterwarnings("ignore:a layer with:UserWarning")
def test_converted_model_is_loaded(flat, capsys):
    path, model = flat
    assert main(["convert", str(path), "--out", "ours", "--data", "rotmnist", "--num-heads", "2"]) == 0
    text = capsys.readouterr().out
    assert "revit_small_paper, p4" in text and "note: inexact, as the released model is" in text
    run = load_run(path.parent / "work" / "ours")
    assert run.checkpoint.state == {"epoch": 17} and run.spec.name == "rotmnist" and run.group == "p4"
    x = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(run.model(x), model(x), rtol=0, atol=1e-5)


def test_windowed_model(tmp_path, capsys):
    model = make_model("p4m", windowed=True, dtype=torch.float32)
    torch.save(released_state(model, names=""), tmp_path / "windowed.pth")
    words = ["convert", str(tmp_path / "windowed.pth"), "--num-heads", "[1,2]", "--window-size", "3", "--out"]
    assert main([*words, "ours", "--size", "33"]) == 0
    assert "attends to the padding" in capsys.readouterr().out  # 33 -> 17 -> 9 -> 5, which 3 does not divide
    arguments = read_checkpoint(tmp_path / "work" / "ours").config["recipe"]["model"]
    assert arguments["dims"] == [4, 6] and arguments["window_size"] == 3 and arguments["stride"] == [2, 2]


def test_refusals(flat, fails, tmp_path):
    path, _ = flat
    words = ["convert", path, "--out", "ours"]
    assert "say what it was trained on" in fails(*words)
    assert "give --num-heads" in fails(*words, "--data", "rotmnist")
    assert "takes 1 channels, images of cifar10 have 3" in fails(*words, "--data", "cifar10", "--num-heads", "2")
    assert "num_heads=3 does not divide" in fails(*words, "--data", "rotmnist", "--num-heads", "3")
    kept = fails(*words, "--data", "rotmnist", "--num-heads", "2", "--num-classes", "4")
    assert "4 outputs, rotmnist has 10 classes; --num-classes 10" in kept
    assert "11 of them cannot be kept" in fails(*words, "--size", "28", "--num-heads", "2", "--num-classes", "11")
    state = torch.load(path, weights_only=True)["model_state_dict"]
    torch.save({**state, "module.extra": torch.zeros(1)}, tmp_path / "extra.pt")
    line = fails("convert", tmp_path / "extra.pt", "--out", "ours", "--data", "rotmnist", "--num-heads", "2")
    assert f"{tmp_path / 'extra.pt'}: 1 unknown keys: extra" in line
    assert "cannot be read" in fails("convert", "nothing.pt", "--out", "ours", "--size", "28")
    assert not (tmp_path / "work" / "ours").exists()
    (tmp_path / "work" / "ours").mkdir()
    assert "is already there" in fails(*words, "--data", "rotmnist", "--num-heads", "2")
