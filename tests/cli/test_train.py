"""`revit train` as a user types it: the run folder, resuming, and everything that can be wrong."""

import csv
import gc
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from accelerate import Accelerator

from revit.cli import main, train
from revit.cli.report import report_audit
from revit.data.loader import EvalLoader
from revit.training.checkpoint import read_checkpoint
from revit.training.loop import Training
from tests.cli.conftest import TINY, png_folder

FILES = {
    "config.yaml", "env.json", "results.csv", "tb", "checkpoints", "test.json", "audit.json", "curves.png",
    "confusion_matrix.png", "calibration.png", "audit_polar.png", "run.lock",
}  # fmt: skip


def test_a_run_folder_has_everything(npz, tmp_path, capsys):
    assert main([*npz, "--out", "run"]) == 0
    run = tmp_path / "work" / "run"
    assert {entry.name for entry in run.iterdir()} == FILES
    assert {entry.name for entry in (run / "checkpoints").glob("[!.]*")} == {"last", "best"}
    assert {entry.name for entry in (run / "checkpoints" / "best").iterdir()} == {
        "model.safetensors", "config.json", "trainer.safetensors", "trainer.json", "manifest.json",
    }  # fmt: skip
    rows = list(csv.DictReader((run / "results.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    result = json.loads((run / "test.json").read_text())
    assert result["images"] == 21 and sum(map(sum, result["confusion"])) == 21 and result["seed"] == 0
    assert result["command"] and result["commit"] and "toy.npz" in result["data"]
    audit = json.loads((run / "audit.json").read_text())["audit"]
    assert audit["passed"] and audit["consistency_percent_mean"] == 100
    printed = capsys.readouterr().out
    assert "100.00 %" in printed and "epoch 2/2" in printed and "parameters" in printed
    assert any((run / "tb").iterdir())


def test_the_same_seed_gives_the_same_bits_and_another_does_not(npz):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert main([*npz, "--out", out, "--train.seed", str(seed), "--train.ema", "0.9"]) == 0
    a, b, c = (read_checkpoint(Path(out) / "checkpoints" / "last").model for out in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not all(np.array_equal(a[name], c[name]) for name in a)


def test_what_exchanges_gradients_is_gone_before_the_process_group(npz, monkeypatch):
    """As the last owner of the process group it would wait for its threads with the interpreter's lock in its hand."""
    left = []
    monkeypatch.setattr(Accelerator, "end_training", lambda _: left.append([type(o) for o in gc.get_objects()]))
    assert main([*npz, "--out", "run", "--train.epochs", "1"]) == 0
    assert len(left) == 1 and Training not in left[0]


def test_resuming_a_finished_run_reads_the_test_no_more(run, capsys):
    before = (run / "test.json").read_text()
    assert main(["train", str(run), "--resume"]) == 0
    assert "finished before: test accuracy" in capsys.readouterr().out
    assert (run / "test.json").read_text() == before


def test_a_trial_leaves_the_test_images_unread(npz, capsys, monkeypatch):
    read = []
    monkeypatch.setattr(
        train, "EvalLoader", lambda images, *rest, **more: read.append(images) or EvalLoader(images, *rest, **more)
    )
    monkeypatch.setattr(train, "report_audit", lambda images, *rest: read.append(images) or report_audit(images, *rest))
    assert main([*npz, "--out", "trial", "--no-test"]) == 0
    assert not Path("trial/test.json").exists()
    result = json.loads(Path("trial/validation.json").read_text())
    assert result["split"] == "validation" and result["accuracy"] == result["validation_accuracy"]
    assert {len(images) for images in read} == {result["images"]} != {21}
    assert "validation: accuracy" in capsys.readouterr().out
    assert main(["train", "trial", "--resume", "--no-test"]) == 0
    assert "finished before: validation accuracy" in capsys.readouterr().out
    assert main(["train", "trial", "--resume"]) == 0  # the one time that it is read
    assert json.loads(Path("trial/test.json").read_text())["images"] == 21


def test_a_run_folder_is_a_recipe(run):
    assert main(["train", str(run), "--out", "second"]) == 0
    assert Path("second/config.yaml").read_text() == (run / "config.yaml").read_text()


def test_default_names_do_not_collide(npz, tmp_path):
    (tmp_path / "work" / "runs" / "toy").mkdir(parents=True)
    assert main(npz) == 0
    assert sorted(path.name for path in (tmp_path / "work" / "runs").iterdir()) == ["toy", "toy-2"]


def test_print_config_is_a_recipe(npz, tmp_path, capsys):
    assert main([*npz, "--print_config", "--train.lr", "0.5", "--model.kernel_size=3"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["train"]["lr"] == 0.5 and values["model"]["kernel_size"] == 3 and values["data"]["name"] == "arrays"
    assert list(tmp_path.joinpath("work").iterdir()) == []


def test_match_params_takes_the_largest_width(npz, capsys):
    assert main([*npz, "--match-params", "5000", "--print_config"]) == 0
    out = capsys.readouterr().out
    dims = yaml.safe_load(out[out.index("model:") :])["model"]["dims"]
    from revit import create_model

    def count(width):
        model = create_model("revit_tiny", group="p4", dims=width, depths=1, num_heads=1, in_chans=1, num_classes=3)
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(dims) <= 5000 < count(dims + 1)


def test_a_folder_of_images(tmp_path, capsys):
    png_folder(tmp_path / "images", (("cats", 30), ("dogs", 30)))
    words = ["train", "folder", "--data-root", str(tmp_path / "images"), "--out", "run", *TINY, "--model.stride", "2"]
    assert main([*words, "--train.epochs", "6", "--train.lr", "0.01"]) == 0
    assert json.loads(Path("run/test.json").read_text())["accuracy"] >= 0.9
    assert main(["predict", str(tmp_path / "images"), "--run", "run", "--out", "p.csv"]) == 0
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert len(rows) == 60 and {row["label"] for row in rows} == {"cats", "dogs"}


def test_bad_images_are_skipped_and_counted(tmp_path, capsys, fails):
    folder = png_folder(tmp_path / "images", (("cats", 20), ("dogs", 20)))
    (folder / "cats" / "3.png").write_bytes(b"not an image")
    (folder / "dogs" / "7.png").write_bytes((folder / "dogs" / "8.png").read_bytes()[:60])
    words = ["train", "folder", "--data-root", folder, "--out", "run", *TINY]
    line = fails(*words)
    assert "3.png" in line and "--on-bad skip" in line
    assert "2 of 40 images cannot be read, more than the 0.01" in fails(*words, "--on-bad", "skip")
    assert main([*map(str, words), "--on-bad", "skip", "--data.max_bad", "0.05"]) == 0
    assert "2 images that cannot be read were skipped" in capsys.readouterr().out


WRONG = [
    (["train"], "RECIPE is missing"),
    (["train", "demos"], "unknown recipe 'demos'; did you mean demo?"),
    (["train", "demo", "--epochs", "3"], "unknown option --epochs; did you mean --train.epochs?"),
    (["train", "demo", "--train.epoch", "3"], "unknown option --train.epoch; did you mean --train.epochs"),
    (["train", "demo", "--train.epochs", "many"], "--train.epochs: expected a whole number, got 'many'"),
    (["train", "demo", "--train.epochs", "0"], "train.epochs must be at least 1, got 0"),
    (["train", "demo", "--train.lr"], "expected one argument"),
    (["train", "demo", "--model.group", "p0"], "p0"),
    (["train", "demo", "--model.name", "revit_tinny"], "unknown model 'revit_tinny'; did you mean revit_tiny"),
    (["train", "demo", "--data.name", "rotmnist6k"], "unknown dataset 'rotmnist6k'; did you mean rotmnist5k"),
    (["train", "demo", "--on-bad", "ignore"], "on_bad must be stop or skip, got 'ignore'"),
    (["train", "demo", "--resume"], "--resume needs the run"),
    (["train", "demo", "--allow-change", "train.rate"], "--allow-change: unknown name 'train.rate'; give options as train.lr"),
    (["train", "demo", "--match-params", "10"], "no width fits 10 parameters"),
    (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read (No such file or directory)"),
    (["train", "folder"], "folder needs its folder: give --data-root DIR or set REVIT_DATA"),
    (["train", "folder", "--data-root", "nowhere"], "nowhere: no such folder"),
    (["train", "rotmnist_p4", "--data-root", "."], "mnist"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_commands_get_one_clear_line(fails, words, message, tmp_path):
    assert message in fails(*words)
    assert not (tmp_path / "work" / "runs").exists()


def test_wrong_recipes_are_named(fails, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train: {epoch: 3}")
    assert "unknown option train.epoch; did you mean train.epochs?" in fails("train", path)
    path.write_text("train: {epochs: many}")
    assert "--train.epochs: expected a whole number, got 'many'" in fails("train", path)
    path.write_text("train: {lr: ~}")
    assert "train.lr has no value; write one, or leave the option out" in fails("train", path)
    path.write_text(f"train: {{lr: {'9' * 400}}}")
    assert f"recipe {path}: train.lr has a number of more than 64 bits" in fails("train", path)
    for text in (f"train: {{seed: 0x{'9' * 5000}}}", f"model: {{dims: [4, 0x{'9' * 5000}]}}"):
        path.write_text(text)
        assert "has a number of more than 64 bits; write a smaller one" in fails("train", path)
    assert "--train.seed: a number of more than 64 bits" in fails("train", "demo", "--train.seed", "0x" + "9" * 5000)
    path.write_text("base: nothing")
    assert "unknown recipe 'nothing'" in fails("train", path)


def test_wrong_folders_of_images(fails, tmp_path):
    root = tmp_path / "images"
    words = ["train", "folder", "--data-root", root, *TINY]
    root.mkdir()
    assert str(root) in fails(*words)
    png_folder(root, (("cats", 4),))
    assert "class" in fails(*words)
    (root / "dogs").mkdir()
    assert "dogs" in fails(*words)
    shutil.rmtree(root)
    png_folder(root / "train")
    png_folder(root / "val", (("cats", 2), ("birds", 2)))
    line = fails(*words)
    assert "birds" in line and "dogs" in line


def test_image_bombs_are_refused_before_decoding(fails, tmp_path):
    from PIL import Image

    folder = png_folder(tmp_path / "images")
    Image.new("1", (20_000, 20_000)).save(folder / "cats" / "bomb.png")
    line = fails("train", "folder", "--data-root", folder, *TINY)
    assert "bomb.png" in line and "pixels" in line


def test_a_run_folder_in_use_or_of_another_configuration(npz, run, fails):
    assert "holds a run already; add --resume" in fails(*npz, "--out", run)
    line = fails(*npz, "--out", run, "--resume", "--train.lr", "0.5")
    assert "train.lr (0.01, now 0.5)" in line and "or add --allow-change train.lr" in line
    assert main([*npz, "--out", str(run), "--resume", "--train.lr", "0.5", "--allow-change", "train.lr"]) == 0
    from revit.training.recipe import Recipe
    from revit.training.run_folder import RunFolder

    with RunFolder(Path("other")) as folder:
        folder.start(Recipe(), resume=False)
        assert "in use by process" in fails(*npz, "--out", "other", "--resume")


def test_a_run_that_diverges_says_so_and_keeps_its_last_state(npz, fails):
    line = fails(*npz, "--out", "run", "--train.lr", "1e30", "--train.clip", "0", "--train.warmup", "0", code=1)
    assert "is not a finite number" in line and "keeps the last good state" in line and "/train/" in line
    read_checkpoint(Path("run/checkpoints/last"))


def test_a_full_disk_keeps_the_last_checkpoint(npz, fails, monkeypatch):
    import errno
    import os

    calls = []
    sync = os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) > 14:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in fails(*npz, "--out", "run")
    read_checkpoint(Path("run/checkpoints/last"))


def test_a_damaged_checkpoint_is_not_loaded(run, fails):
    with open(run / "checkpoints/best/model.safetensors", "r+b") as file:
        file.seek(-100, 2)
        file.write(b"\0\1\2\3")
    assert "model.safetensors: damaged" in fails("eval", run)
    assert "model.safetensors: damaged" in fails("predict", ".", "--run", run, "--out", "p.csv")
