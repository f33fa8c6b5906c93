"""A small dataset of the true format, and the command line run in this process."""

import os
import shutil
from pathlib import Path

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


def write_npz(folder):
    """48 + 21 toy images as an .npz archive; the command that trains on it."""
    train, test = toy(48), toy(21, 1)
    np.savez(
        folder / "toy.npz", train_images=train.images[:, 0], train_labels=train.labels, test_images=test.images[:, 0],
        test_labels=test.labels, classes=np.array(["dark", "bright", "striped"]),
    )  # fmt: skip
    recipe = folder / "toy.yaml"
    recipe.write_text("data: {name: arrays, val_fraction: 0.25}\naugment: {rotate: 180}\ntrain: {lr: 0.01}\n")
    return ["train", str(recipe), "--data-root", str(folder), *TINY]


@pytest.fixture
def npz(tmp_path):
    return write_npz(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """One run for all tests that only look at one."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVIT_CACHE", str(folder / "cache"))
        assert main([*write_npz(folder), "--out", str(folder / "run")]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder / "run"


@pytest.fixture
def run(trained):
    """A copy of that run, to be read, evaluated and damaged."""
    shutil.copytree(trained, "runs/one")
    return Path("runs/one")


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
