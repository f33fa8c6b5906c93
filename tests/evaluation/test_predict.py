"""Predictions row by row: right, in order, whole or not there, in flat memory."""

import csv
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from revit.data.spec import BadImage, DataError, DataSpec
from revit.evaluation import find_images, predict, predict_files, write_predictions
from revit.models import create_model
from tests.evaluation.models import OrbitMean, Plain, Sides, WithFeatures

SPEC = DataSpec("three", 3, (8, 8), ("cat", 'a "dog", small', "ox"), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "made up")
GREY = DataSpec("grey", 1, (8, 8), ("left", "right"), (0.5,), (0.5,), "made up")


def save(path, *, channels=3, seed=0, size=(8, 8)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(path, format="PNG")
    return path


@pytest.fixture
def files(tmp_path):
    return [save(tmp_path / "in" / f"{i}.png", seed=i) for i in range(7)]


def read_table(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def by_hand(model, path, spec=SPEC):
    """Probabilities by the definition, one file at a time."""
    pixels = np.asarray(Image.open(path), dtype=np.float64).reshape(8, 8, spec.channels) / 255
    x = torch.from_numpy((pixels - spec.mean) / spec.std).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        return model.eval()(x).softmax(1)[0], x


def test_the_table(files, tmp_path):
    model = Plain(3, 3)
    written = write_predictions(model, SPEC, files, tmp_path / "new" / "out.csv", batch_size=3)
    assert (written.rows, written.skipped, written.skipped_list) == (7, 0, None)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.csv"]
    assert b"\r" not in (tmp_path / "new" / "out.csv").read_bytes()  # lines for awk and grep
    rows = read_table(tmp_path / "new" / "out.csv")
    assert list(rows[0]) == ["path", "label", "confidence", "prob_cat", 'prob_a "dog", small', "prob_ox"]
    for row, path in zip(rows, files, strict=True):
        expected, _ = by_hand(model, path)
        assert row["path"] == str(path) and row["label"] == SPEC.classes[int(expected.argmax())]
        assert [float(value) for value in list(row.values())[3:]] == pytest.approx(expected.tolist(), abs=2e-6)
        assert float(row["confidence"]) == pytest.approx(expected.max().item(), abs=2e-6)


def test_images_of_other_sizes_and_kinds(tmp_path):
    """Grey becomes colour, 16 bits keep their values, any size is cut and resized."""
    wide = save(tmp_path / "wide.png", size=(20, 40))
    grey = save(tmp_path / "grey.png", channels=1)
    deep = tmp_path / "deep.png"
    values = np.random.default_rng(1).integers(0, 65536, (8, 8), dtype=np.uint16)
    Image.fromarray(values).save(deep)
    model = Plain(3, 3)
    (batch,) = predict_files(model, SPEC, [wide, grey, deep])
    assert batch.probabilities.shape == (3, 3)
    with torch.no_grad():
        for i, pixels in ((1, np.asarray(Image.open(grey)) / 255), (2, values / 65535)):
            x = torch.from_numpy((np.repeat(pixels[..., None], 3, axis=2) - SPEC.mean) / SPEC.std).permute(2, 0, 1)
            torch.testing.assert_close(batch.probabilities[i], model(x[None].float()).softmax(1)[0], rtol=1e-5, atol=1e-6)


def test_agreement_counts_elements(tmp_path):
    """Against the eight turns and mirrors by torch.rot90 and flip."""
    paths = [save(tmp_path / f"{i}.png", channels=1, seed=i) for i in range(6)]
    write_predictions(Sides(), GREY, paths, tmp_path / "out.csv", agreement="p4m", batch_size=4)
    for row, path in zip(read_table(tmp_path / "out.csv"), paths, strict=True):
        _, x = by_hand(Sides(), path, GREY)
        orbit = [torch.rot90(y, r, (-2, -1)) for y in (x, x.flip(-1)) for r in range(4)]
        same = [bool(Sides()(y).argmax() == Sides()(x).argmax()) for y in orbit]
        assert float(row["agreement"]) == pytest.approx(sum(same) / 8, abs=1e-5)
        assert list(row)[-1] == "agreement"


def test_an_invariant_model_agrees_with_itself(files):
    batches = predict_files(OrbitMean(Plain(3, 3)).double(), SPEC, files, agreement="p4m")
    assert torch.cat([batch.agreement for batch in batches]).tolist() == [1] * 7


def test_corners_turn_in_black(tmp_path):
    """At 45 degrees a white image gets black corners, not grey ones, which the mean would be."""

    class DarkestCorner(nn.Module):
        def forward(self, x):
            corner = x[:, 0, 0, 0]
            return torch.stack([(corner + 0.9).relu(), (-corner - 0.9).relu() * 100], dim=1)  # black is -1, the mean 0

    path = tmp_path / "white.png"
    Image.fromarray(np.full((8, 8), 255, dtype=np.uint8)).save(path)
    (batch,) = predict_files(DarkestCorner(), GREY, [path], agreement="p8")
    assert batch.agreement.tolist() == [0.5]  # four exact turns keep the corner white


def test_embeddings_correspond_to_rows(files, tmp_path):
    model = create_model("revit_tiny", group="p4", in_chans=3, num_classes=3, dims=4, depths=1, num_heads=1).eval()
    bad = tmp_path / "in" / "bad.png"
    bad.write_bytes(b"no image")
    paths = [files[0], bad, *files[1:]]
    write_predictions(
        model, SPEC, paths, tmp_path / "out.csv", embeddings=tmp_path / "features.npy", on_bad="skip", batch_size=2
    )
    features = np.load(tmp_path / "features.npy")
    assert features.dtype == np.float32 and features.shape == (7, 4)
    for row, feature in zip(read_table(tmp_path / "out.csv"), features, strict=True):
        _, x = by_hand(model, Path(row["path"]))
        with torch.no_grad():
            expected = model.forward_head(model.forward_features(x), pre_logits=True)[0]
        np.testing.assert_allclose(feature, expected.numpy(), rtol=1e-4, atol=1e-5)
    (batch,) = predict_files(WithFeatures(), SPEC, files, embeddings=True)
    (plain,) = predict_files(WithFeatures(), SPEC, files)
    assert batch.embeddings.shape == (7, 3) and plain.embeddings is None


def test_skipped_files_are_listed(files, tmp_path):
    files[2].write_bytes(b"no image at all")
    files[5].unlink()
    written = write_predictions(Plain(3, 3), SPEC, files, tmp_path / "out.csv", on_bad="skip", batch_size=2)
    assert (written.rows, written.skipped, written.skipped_list) == (5, 2, tmp_path / "out.csv.skipped.csv")
    skipped = read_table(written.skipped_list)
    assert [row["path"] for row in skipped] == [str(files[2]), str(files[5])]
    assert skipped[0]["reason"].startswith("not an image") and skipped[1]["reason"].startswith("no such file")
    assert [row["path"] for row in read_table(tmp_path / "out.csv")] == [str(f) for i, f in enumerate(files) if i not in (2, 5)]
    write_predictions(Plain(3, 3), SPEC, files[:2], tmp_path / "out.csv", on_bad="skip")
    assert not written.skipped_list.exists()  # it belonged to the older table


def test_stop_names_the_file_and_keeps_the_older_table(files, tmp_path):
    out, features = tmp_path / "out.csv", tmp_path / "features.npy"
    model = WithFeatures()
    write_predictions(model, SPEC, files, out, embeddings=features)
    before = out.read_bytes(), features.read_bytes()
    files[4].write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"4\.png: not an image"):
        write_predictions(model, SPEC, files, out, embeddings=features, batch_size=2)
    assert (out.read_bytes(), features.read_bytes()) == before
    fresh = tmp_path / "fresh.csv"
    with pytest.raises(BadImage):
        write_predictions(model, SPEC, files, fresh)
    assert not fresh.exists()


def test_interruption_leaves_what_was_done(files, tmp_path):
    out, features = tmp_path / "out.csv", tmp_path / "features.npy"
    out.write_text("older")

    def paths():
        yield from files
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(WithFeatures(), SPEC, paths(), out, embeddings=features, batch_size=1)
    assert out.read_text() == "older" and not features.exists()
    rows = read_table(tmp_path / "out.csv.partial")
    kept = np.load(tmp_path / "features.npy.partial")
    assert 0 < len(rows) == len(kept) < 7
    write_predictions(WithFeatures(), SPEC, files, out, embeddings=features)
    assert len(read_table(out)) == len(np.load(features)) == 7
    assert not list(tmp_path.glob("*.partial"))


def test_nothing_to_predict(tmp_path):
    written = write_predictions(WithFeatures(), SPEC, [], tmp_path / "out.csv", embeddings=tmp_path / "features.npy")
    assert written.rows == 0 and (tmp_path / "out.csv").read_text().startswith("path,label,confidence,prob_cat,")
    assert len(np.load(tmp_path / "features.npy")) == 0


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"a,b.png", b'say "x".png', b"two\nlines.png", b"end\r.png", b"=1+1.png"])
def test_names_of_any_kind_survive(name, tmp_path):
    path = tmp_path / os.fsdecode(name)
    try:
        save(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    write_predictions(Plain(3, 3), SPEC, [path], tmp_path / "out.csv")
    (row,) = read_table(tmp_path / "out.csv")
    assert os.fsencode(row["path"]) == os.fsencode(path)
    assert name in (tmp_path / "out.csv").read_bytes().replace(b'""', b'"')


def test_the_model_and_the_gradients_are_the_consumers_between_batches(files):
    model = nn.Sequential(Plain(3, 3), nn.Dropout(0.5)).train()
    first = []
    for batch in predict_files(model, SPEC, files, batch_size=3):
        assert model.training and torch.is_grad_enabled() and not batch.probabilities.requires_grad
        first.append(batch.probabilities)
    again = [batch.probabilities for batch in predict_files(model, SPEC, files, batch_size=3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # no dropout


def test_reading_ahead_keeps_the_order_and_is_bounded(files, monkeypatch):
    taken = []

    def paths():
        for i in range(100):
            taken.append(i)
            yield files[i % 7]

    def slow_read(spec, dtype, path):
        time.sleep(0.003 * (int(path.stem) % 3))
        return torch.full((3, 8, 8), float(path.stem))

    monkeypatch.setattr(predict, "_read", slow_read)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    threads = threading.active_count()
    batches = predict_files(model, SPEC, paths(), batch_size=5, workers=3)
    assert not taken  # nothing is read before it is asked for
    seen = []
    for i, batch in enumerate(batches):
        assert len(taken) <= 5 * (i + 1) + 2 * 5
        seen += batch.paths
        if i == 3:
            batches.close()
            break
    assert seen == [files[i % 7] for i in range(20)]
    assert len(taken) < 35 and threading.active_count() == threads


MEMORY = """
import resource, sys, torch
from pathlib import Path
from revit.data.spec import DataSpec
from revit.evaluation import write_predictions

torch.set_num_threads(1)
folder, count = Path(sys.argv[1]), 2000
spec = DataSpec("many", 3, (8, 8), tuple(map(str, range(500))), (0.5,) * 3, (0.5,) * 3, "made up")

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(192, 500)
    def forward_features(self, x):
        return self.fc(x.flatten(1))
    def forward_head(self, x, *, pre_logits=False):
        return x
    forward = forward_features

peaks = []
def paths():
    for i in range(count):
        if i in (count // 4, count - 1):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        yield folder / ("bad.png" if i % 10 == 0 else f"{i % 7}.png")

written = write_predictions(
    Wide(), spec, paths(), folder / "out.csv", embeddings=folder / "features.npy", agreement="p4", on_bad="skip"
)
print(written.rows, written.skipped, *peaks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units")
def test_memory_is_flat(files):
    """After a quarter of 2,000 images the peak is reached: kept results would add 4 MB and more."""
    folder = files[0].parent
    (folder / "bad.png").write_bytes(b"no image")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-W", "error", "-c", MEMORY, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    rows, skipped, quarter, end = map(int, result.stdout.split())
    assert (rows, skipped) == (1800, 200)
    assert np.load(folder / "features.npy", mmap_mode="r").shape == (1800, 500)
    assert end - quarter < 2 * 1024, f"{end - quarter} KB more at the end than after a quarter"


def test_find_images(tmp_path, monkeypatch):
    names = ["a.png", "b.JPG", "notes.txt", "deep/er/c.tif", "deep/d.png", ".hidden.png", ".git/e.png", "x[1].png", "odd"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)

    def found(*patterns):
        return [str(path) for path in find_images(patterns)]

    everything = ["a.png", "b.JPG", "deep/d.png", "deep/er/c.tif", "x[1].png"]
    assert found(".") == everything
    assert found(str(tmp_path)) == [str(tmp_path / name) for name in everything]
    assert found("*.png") == ["a.png", "x[1].png"]
    assert found("**/*.png") == ["a.png", "deep/d.png", "x[1].png"]
    assert found("deep*") == ["deep/d.png", "deep/er/c.tif"]
    assert found("deep/loop/*.png") == ["deep/loop/a.png", "deep/loop/x[1].png"]  # the link is named
    assert found("odd", "x[1].png") == ["odd", "x[1].png"]  # a file that is named is taken as it is
    assert found("deep", "a.png", "./a.png", "*.png", str(tmp_path / "a.png")) == [
        "deep/d.png",
        "deep/er/c.tif",
        "a.png",
        "x[1].png",
    ]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/a.png") == [str(tmp_path / "a.png")]
    (tmp_path / "empty").mkdir()
    for pattern, message in [
        ("gone.png", r"gone\.png: no such file or folder"),
        ("*.bmp", r"\*\.bmp: matches no images; their names end in \.bmp"),
        ("empty", "empty: no images in this folder"),
    ]:
        with pytest.raises(DataError, match=message):
            find_images(["a.png", pattern])


def test_messages(files, tmp_path):
    out = tmp_path / "out.csv"
    broken = Plain(3, 3)
    nn.init.constant_(broken.conv.bias, math.nan)
    for error, message, call in [
        (
            ValueError,
            "need a model with forward_features.*, got Plain",
            lambda: predict_files(Plain(), SPEC, [], embeddings=True),
        ),
        (ValueError, "at least 1, got 0 and 2", lambda: predict_files(Plain(), SPEC, [], batch_size=0)),
        (ValueError, "unknown group 'q4'", lambda: predict_files(Plain(), SPEC, [], agreement="q4")),
        (
            ValueError,
            r"three has 3 classes, the model returns shape \[7, 4\]",
            lambda: list(predict_files(Plain(3), SPEC, files)),
        ),
        (ValueError, r"0\.png: the model returns NaN", lambda: list(predict_files(broken, SPEC, files))),
        (
            DataError,
            "on_bad must be stop or skip, got 'ignore'",
            lambda: write_predictions(Plain(), SPEC, [], out, on_bad="ignore"),
        ),
        (DataError, "different names", lambda: write_predictions(Plain(), SPEC, [], out, embeddings=out)),
        (DataError, "in: a folder; name the file to write", lambda: write_predictions(Plain(), SPEC, [], tmp_path / "in")),
    ]:
        with pytest.raises(error, match=message):
            call()
