"""A small dataset of the true format, and the command line run in this process."""

import os

import numpy as np
import pytest
from accelerate.state import AcceleratorState

from revit.cli import main
from tests.training.runs import toy

TINY = [
    "--model.name", "revit_tiny", "--model.group", "p4", "--model.dims", "4", "--model.depths", "1", "--model.num_heads", "1",
    "--train.epochs", "2", "--train.batch_size", "8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Nothing of this machine: an own cache, no data root, an empty folder to work in."""
    monkeypatch.setenv("REVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REVIT_DATA", raising=False)
    monkeypatch.delenv("REVIT_DEBUG", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def npz(tmp_path):
    """40 + 20 toy images as an .npz archive; the recipe that trains on it."""
    train, test = toy(48), toy(21, 1)
    np.savez(
        tmp_path / "toy.npz", train_images=train.images[:, 0], train_labels=train.labels, test_images=test.images[:, 0],
        test_labels=test.labels, classes=np.array(["dark", "bright", "striped"]),
    )  # fmt: skip
    recipe = tmp_path / "toy.yaml"
    recipe.write_text("data: {name: arrays, val_fraction: 0.25}\naugment: {rotate: 180}\ntrain: {lr: 0.01}\n")
    return ["train", str(recipe), "--data-root", str(tmp_path), *TINY]


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail with one line, and returns that line."""

    def run(*words, code=2):
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        captured = capsys.readouterr()
        lines = captured.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
        assert "Traceback" not in captured.err + captured.out
        return lines[0]

    return run


def png_folder(root, counts=(("cats", 6), ("dogs", 6)), size=(8, 8)):
    """A folder of PNG files, one class brighter than the other."""
    from PIL import Image

    generator = np.random.Generator(np.random.PCG64(0))
    for k, (name, count) in enumerate(counts):
        os.makedirs(root / name, exist_ok=True)
        for i in range(count):
            pixels = generator.integers(100 * k, 100 * k + 100, (*size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root
