"""The weights that come with the package: small, loaded without a network, as good as their cards say."""

import json
from importlib import resources

import pytest
import torch

from revit import create_model, list_models, prediction_consistency
from revit.data import DataOptions, open_dataset
from revit.data.loader import EvalLoader

FOLDER = resources.files("revit") / "weights"
NAMES = list_models(pretrained=True)


def test_models_of_rotated_digits_are_there():
    sizes = {"p4": ("", "_44k", "_100k"), "p8": ("", "_44k")}
    assert {f"revit_rotmnist_{group}{size}" for group, names in sizes.items() for size in names} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_small_and_have_a_card(name):
    folder = FOLDER / name
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 600_000
    config, card = json.loads((folder / "config.json").read_text()), (folder / "README.md").read_text()
    assert f"`{config['model']}`" in card and "test accuracy" in card and "`revit " in card
    assert create_model(name, pretrained=True).training is False


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("revit_rotmnist_")])
def test_they_read_the_digits_of_the_package(name):
    """MNIST digits turned by other angles than those of the 50,000 test images, which the tests do not have. Training may have
    seen some of them: this is a check of the files, and no accuracy to report."""
    model = create_model(name, pretrained=True)
    dataset = open_dataset(DataOptions(name="rotmnist5k"))
    loader = EvalLoader(dataset.split("test"), dataset.spec, batch_size=250)
    assert (tuple(model.config.data["mean"]), tuple(model.config.data["std"])) == (dataset.spec.mean, dataset.spec.std)
    right = total = 0
    for batch in loader:
        images = loader.prepare(batch, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            right += int((model(images).argmax(1) == batch.labels).sum())
        total += len(images)
    assert right / total > 0.95
    exact = model.group if model.group.is_exact else "p4"  # the turns of p8 that move pixels onto pixels
    assert (prediction_consistency(model, images[:64], exact) == 1).all()
