"""`import revit.timm` puts our models into timm's registry. In a process of its own, where timm can be imported."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

OPERATIONS = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):  # a torchvision that was built for another torch does not bring them, and then does not import
    try:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        pass
import timm
"""

CODE = """
import warnings
warnings.simplefilter("error")
import revit.timm
from pathlib import Path
from revit import create_model, list_models
from revit.models import model_config
from tests.models.test_pretrained import DATA, TINY, tiny

assert all(timm.is_model(name) for name in list_models())
assert not hasattr(timm.create_model("resnet18"), "group")
torch.manual_seed(0)
model = timm.create_model("revit_tiny", **TINY)
torch.manual_seed(0)
expected, x = create_model("revit_tiny", **TINY), torch.randn(2, 1, 8, 8)
assert torch.equal(model(x), expected(x)) and model.num_classes == 3

maps = timm.create_model("revit_hier_tiny", group="p4", features_only=True, out_indices=(1, 3))
assert [tuple(m.shape[1:2]) for m in maps(torch.randn(1, 3, 64, 64))] == [(c,) for c in maps.feature_info.channels()]
assert maps.feature_info.reduction() == [8, 32] and len(maps.feature_info) == 2

def refusal(*arguments, **options):
    try:
        timm.create_model(*arguments, **options)
    except ValueError as error:
        return str(error)

assert "no tags and configs of timm" in refusal("revit_tiny.a_tag")
assert "no weights of 'revit_tiny' come with the package" in refusal("revit_tiny", pretrained=True)

model_config.WEIGHTS = Path("weights")
tiny().save_pretrained("weights/revit_toy_p4", data=DATA)
revit.timm.register("revit_toy_p4")
model = timm.create_model("revit_toy_p4", pretrained=True)
config = timm.data.resolve_model_data_config(model)
assert config["input_size"] == (1, 8, 8) and config["mean"] == (0.4,) and config["std"] == (0.3,), config
"""


@pytest.fixture(scope="module")
def needs_timm():
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    found = subprocess.run([sys.executable, "-c", OPERATIONS], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"timm does not import: {found.stderr.strip().splitlines()[-1]}")


def test_models_are_in_timm(needs_timm, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    found = subprocess.run([sys.executable, "-c", OPERATIONS + CODE], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_without_timm():
    with pytest.raises(ImportError, match="revit.timm needs timm and torchvision, which are not installed; pip install timm"):
        import revit.timm  # noqa: F401
