"""torch.hub finds our models in a checkout."""

import runpy
from pathlib import Path

import pytest
import torch

from revit import create_model, list_models
from revit.models import model_config
from tests.models.test_pretrained import TINY, tiny

ROOT = str(Path(__file__).parents[1])


def load(name, *arguments, **options):
    return torch.hub.load(ROOT, name, *arguments, source="local", **options)


def test_every_registered_model_is_an_entry_point():
    """Public callables of hubconf.py are what torch.hub lists."""
    found = {name for name, value in runpy.run_path(f"{ROOT}/hubconf.py").items() if callable(value) and name[0] != "_"}
    assert found == {*list_models(), *list_models(pretrained=True), "from_pretrained"}


def test_models_of_the_hub_are_those_of_the_registry():
    torch.manual_seed(0)
    model = load("revit_tiny", **TINY)
    torch.manual_seed(0)
    expected = create_model("revit_tiny", **TINY)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert "44K parameters" in runpy.run_path(f"{ROOT}/hubconf.py")["revit_tiny"].__doc__
    with pytest.raises(ValueError, match="no weights of 'revit_tiny' come with the package"):
        load("revit_tiny", pretrained=True)


def test_weights_through_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(model_config, "WEIGHTS", tmp_path)
    model, x = tiny(), torch.randn(2, 1, 8, 8)
    model.save_pretrained(tmp_path / "revit_toy_p4")
    assert torch.equal(load("revit_toy_p4", pretrained=True)(x), model(x))
    assert torch.equal(load("from_pretrained", tmp_path / "revit_toy_p4")(x), model(x))
