"""What can be audited: each kind gives the outputs of the model that it was made of, and each wrong one a clear line."""

import os
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from revit.cli import model_files
from revit.cli.subjects import open_subject
from revit.evaluation.inference import evaluating, place_of
from revit.training.recipe import ModelOptions

WEIGHT = np.arange(6, dtype=np.float64).reshape(3, 2) - 2.5


class Means(nn.Module):
    """The mean of each channel, times a matrix; with noise if it were in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(WEIGHT).float())
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(x)).mean((2, 3)) @ self.weight


def opened(text, **options):
    return open_subject(str(text), **{"in_chans": 3, "num_classes": 2, **options})


def refused(text, **options):
    """The one line that a subject is refused with."""
    with pytest.raises(ValueError) as caught:
        opened(text, **options)
    assert type(caught.value).__module__.startswith("revit.") and "\n" not in str(caught.value)
    return str(caught.value)


# Runs


def test_runs_and_checkpoints(run):
    for text, label, options in (
        (run, "runs/one", {}),
        (run, "runs/one/checkpoints/last", {"checkpoint": "last"}),
        (run / "checkpoints" / "last", "runs/one/checkpoints/last", {}),
    ):
        subject = opened(text, **options)
        assert (subject.label, subject.group) == (label, "p4") and not subject.model.training
        assert subject.run is not None and subject.run.model is subject.model
        assert subject.spec is not None and subject.spec.classes == ("dark", "bright", "striped")
        assert subject.model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)  # of the run, not of the arguments


def test_folders_that_are_no_runs(run):
    Path("empty").mkdir()
    assert refused("empty") == "empty: no run with a checkpoint 'best' here; train one with `revit train`"
    shutil.rmtree(run / "checkpoints" / "best")
    assert refused(run) == "runs/one: no run with a checkpoint 'best' here; it has last: add --checkpoint"
    (run / "checkpoints" / "last" / "model.safetensors").write_bytes(b"")
    assert refused(run, checkpoint="last").startswith("runs/one/checkpoints/last/model.safetensors: no whole safetensors file")


# Registered models


def test_registered_models():
    options = ModelOptions(name="revit_base", group="p4m", dims=4, depths=1, num_heads=1)
    subject = opened("revit_tiny", options=options, in_chans=2, num_classes=5)
    assert (subject.label, subject.group) == ("revit_tiny p4m untrained", "p4m")
    assert subject.spec is None and subject.run is None and not subject.model.training
    assert subject.model(torch.zeros(3, 2, 12, 12)).shape == (3, 5)
    assert options.name == "revit_base"
    Path("revit_tiny").mkdir()  # a folder of that name which is no run does not hide the model
    assert opened("revit_tiny").label == "revit_tiny p4 untrained"
    trivial = opened("revit_tiny", options=ModelOptions(group="z2"))
    assert (trivial.label, trivial.group) == ("revit_tiny untrained", None)


def test_names_that_stand_for_nothing(run):
    assert refused("revit_tinny").startswith("revit_tinny: no folder, file or model of this name; did you mean revit_tiny")
    kinds = "give a run or weights folder, an .onnx or TorchScript (.pt) file, package.module:factory or the name of a model"
    assert refused("xyz") == f"xyz: no folder, file or model of this name; {kinds}; `revit models` lists all models"
    assert refused("runs/two") == f"runs/two: no such file or folder; {kinds}"
    assert refused("a\nb").startswith(r"a\nb: no folder, file or model")
    for name in ("notes.txt", "model.safetensors", "model.ckpt", "model.pkl", "model.py"):
        Path(name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
        assert refused(name) == f"{name}: not the file of a model that can be run; {kinds}"
    with pytest.raises(ValueError, match="unknown group 'q4'"):
        opened("revit_tiny", options=ModelOptions(group="q4"))
    assert not Path("canary").exists()


# package.module:factory

CODE = """
import torch
from torch import nn
class Net(nn.Module):
    group = "D4"
    def forward(self, x): return x.mean((2, 3))
    @classmethod
    def make(cls): return cls()
class Needs(nn.Module):
    def __init__(self, width): super().__init__()
def make(): return Net().train()
def plain():
    model = nn.Linear(2, 2)
    model.group = nn.Identity()
    return model
def broken(): raise RuntimeError("no weights\\nhere")
def leaves(): raise SystemExit(3)
def lists(): return [Net()]
def nothing(): pass
net = Net()
number = 3
"""


@pytest.fixture
def here(monkeypatch):
    """Python files in this folder, found by no other way than that it is the current one."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    before = set(sys.modules)
    Path("own_models").mkdir()
    Path("own_models/nets.py").write_text(CODE)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["make", "Net", "Net.make", "net"])
def test_factories(here, name):
    subject = opened(f"own_models.nets:{name}")
    assert (subject.label, subject.group, subject.spec, subject.run) == (f"own_models.nets:{name}", "p4m", None, None)
    assert not subject.model.training
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(subject.model(x), x.mean((2, 3)))


def test_a_group_that_is_none(here):
    assert opened("own_models.nets:plain").group is None


FACTORIES = [
    ("own_models.nets:mak", "own_models.nets has no mak; did you mean make"),
    ("own_models.nets:Net.built", "Net has no built"),
    ("own_models.nets:number", "a int, not a module or a function that makes one"),
    ("own_models.nets:Needs", "raised TypeError: Needs.__init__() missing 1 required positional argument: 'width'; it is called without arguments"),  # noqa: E501
    ("own_models.nets:broken", "raised RuntimeError: no weights here; it is called without arguments"),
    ("own_models.nets:leaves", "raised SystemExit: 3"),
    ("own_models.nets:lists", "returned a list, not a torch.nn.Module"),
    ("own_models.nets:nothing", "returned a NoneType, not a torch.nn.Module"),
    ("own_models.gone:make", "no module own_models.gone, neither in this folder nor installed; go to the folder that holds it"),
    ("gone.nets:make", "no module gone, neither in this folder"),
    ("own_needs:make", "importing own_needs needs not_there, which is not installed"),
    ("own_syntax:make", "importing own_syntax raised SyntaxError: "),
    ("own_exit:make", "importing own_exit raised SystemExit: bye"),
    ("own_needs.py:make", "not of the form package.module:factory; write own_needs:make"),
    ("own_models/nets.py:make", "not of the form package.module:factory; write own_models.nets:make"),
    ("own_models/gone.py:make", "not of the form package.module:factory"),
    ("own models:make", "not of the form package.module:factory"),
    ("own_models:", "not of the form package.module:factory"),
    (":make", "not of the form package.module:factory"),
    ("a:b:c", "not of the form package.module:factory"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FACTORIES, ids=[text for text, _ in FACTORIES])
def test_wrong_factories(here, text, message):
    Path("own_needs.py").write_text("import not_there")
    Path("own_syntax.py").write_text("def make(:")
    Path("own_exit.py").write_text("import sys; sys.exit('bye')")
    assert refused(text).startswith(f"{text}: {message}")


# TorchScript


@pytest.fixture
def script(tmp_path):
    """Saves a module as TorchScript."""

    def save(name="net.pt", model=None, trace=False):
        model = model or Means()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.trace(model.eval(), torch.zeros(2, 3, 4, 4)) if trace else torch.jit.script(model)
            torch.jit.save(scripted, name)
        return model

    return save


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("suffix", ["pt", "pth", "ts", "jit", "torchscript", "PT"])
def test_torchscript_gives_what_the_module_gives(script, suffix, trace):
    model = script(f"net.{suffix}", trace=trace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also those that the settings of pytest let pass
        subject = opened(f"net.{suffix}")
    assert (subject.label, subject.group, subject.spec, subject.run) == (f"net.{suffix}", None, None, None)
    x = torch.randn(5, 3, 6, 4)
    with evaluating(model):  # the subject is in eval mode as it comes
        assert torch.allclose(subject.model(x), model(x), atol=1e-6)
    assert place_of(subject.model) == (torch.device("cpu"), torch.float32) and not subject.model.training


def test_torchscript_in_double_precision(script):
    model = script(model=Means().double()).eval()
    subject = opened("net.pt")
    assert place_of(subject.model)[1] == torch.float64
    x = torch.randn(5, 3, 6, 4, dtype=torch.float64)
    assert torch.equal(subject.model(x), model(x))


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_torchscript_that_fails_on_images(script):
    script()
    with pytest.raises(ValueError) as caught:
        opened("net.pt").model(torch.zeros(2, 4, 5, 5))
    assert str(caught.value).startswith("net.pt: fails on images [2, 4, 5, 5] (") and "\n" not in str(caught.value)
    assert "3" in str(caught.value) and "4" in str(caught.value) and "Traceback" not in str(caught.value)
    script("pair.pt", Pair())
    with pytest.raises(ValueError, match=r"^pair\.pt: returns a tuple, not a tensor; save a module that does$"):
        opened("pair.pt").model(torch.zeros(2, 3, 5, 5))


NO_SCRIPT = (
    "no TorchScript but a state dict or a pickle, which has no code and is not loaded; write a function that builds the model"
    " and loads the weights, and give package.module:factory"
)


class Canary:
    def __reduce__(self):
        return os.system, ("touch canary",)


def test_pickles_are_refused_and_not_loaded():
    torch.save(Means().state_dict(), "state.pt")
    torch.save({"model": Canary()}, "whole.pth")
    torch.save({"model": Canary()}, "old.pt", _use_new_zipfile_serialization=False)
    Path("text.pt").write_text("hello")
    with zipfile.ZipFile("other.pt", "w") as archive:
        archive.writestr("net/constants.pkl", b"")
        archive.writestr("net/data.pkl", b"")
    with zipfile.ZipFile("code.pt", "w") as archive:
        archive.writestr("net/code/__torch__.py", b"")
    for name in ("state.pt", "whole.pth", "old.pt", "text.pt", "other.pt", "code.pt"):
        assert refused(name) == f"{name}: {NO_SCRIPT}"
    assert not Path("canary").exists()
    torch.load("whole.pth", weights_only=False)
    assert Path("canary").exists()  # so this payload works where it is let in


def test_damaged_torchscript(script, monkeypatch):
    script()
    data = Path("net.pt").read_bytes()
    Path("cut.pt").write_bytes(data[: len(data) // 2])
    assert refused("cut.pt") == "cut.pt: damaged, its end is missing; copy it again"
    place = data.index(WEIGHT.astype(np.float32).tobytes())
    Path("bits.pt").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert refused("bits.pt") == "bits.pt: damaged (net/data/0 is not what it was); copy it again"
    with zipfile.ZipFile("net.pt") as old, zipfile.ZipFile("crafted.pt", "w") as new:
        for member in old.namelist():
            new.writestr(member, b"nonsense" if "/code/" in member else old.read(member))
    assert refused("crafted.pt").startswith("crafted.pt: cannot be loaded (")
    with zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("net/constants.pkl", bytes(70 * 2**20))
        new.writestr("net/code/__torch__.py", b"")
    assert "claims 73,400,320 bytes, at most" in refused("bomb.pt")
    Path("empty.pt").touch()
    assert refused("empty.pt") == "empty.pt: empty, it has 0 bytes; save or copy it again"
    assert refused("gone.pt") == "gone.pt: cannot be read (No such file or directory); check the name and its permissions"
    os.mkfifo("pipe.pt")
    assert refused("pipe.pt") == "pipe.pt: not a regular file; name the file of a model"
    monkeypatch.setattr(model_files, "MAX_BYTES", 1000)
    assert refused("net.pt").startswith(f"net.pt: {len(data):,} bytes, more than the 1,000 that are read")
