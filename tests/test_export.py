"""Exported files give what the model gives, are small, keep the symmetry, and are whole or not there."""

import io
import json
import zipfile

import pytest
import torch
from torch import nn

from revit.cli import main
from revit.evaluation import audit_model
from revit.export import ExportError, export_model
from revit.models import create_model, list_models
from revit.nn import set_algorithm
from tests.cli.conftest import fails as fails
from tests.cli.conftest import surroundings as surroundings
from tests.cli.conftest import trained as trained
from tests.test_deploy import difference, randomised

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

GCNN = {"group": "p4", "dims": 3}


def gcnn(name="gcnn_cifar", **options):
    return randomised(create_model(name, **{**GCNN, **options})).eval()


def images(model, size, count=4):
    return torch.randn(count, model.in_chans, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_files_give_what_the_model_gives(format):
    """Other batches, other images, and the largest error of turned ones: from the bytes alone."""
    model = gcnn()
    exported = export_model(model, images(model, 8), format=format, any_size=False)
    assert exported.sizes == ((8, 8),) and not exported.any_size and exported.difference <= 1e-5
    file, x = exported.load(), images(model, 8, 5)
    with torch.no_grad():
        for batch in (x, x[:1]):
            assert difference(file(batch), model(batch)) <= 1e-5
    assert audit_model(file, x, "p4").worst("logits") <= 1e-4
    if format == "onnx":
        assert len(exported.data) <= 1.1 * exported.weight_bytes + 20_000  # a network of 3 fields: the graph counts
    else:
        with zipfile.ZipFile(io.BytesIO(exported.data)) as archive:
            assert not any(b".py" in archive.read(name) for name in archive.namelist())  # nor where it was made


def test_files_of_any_size_are_right_at_each_that_they_name():
    model = gcnn()
    exported = export_model(model, images(model, 8))
    assert exported.any_size and {(8, 8), (12, 12), (16, 16)} <= set(exported.sizes)
    assert len(exported.checked_sizes) >= 3 and exported.checked_sizes[-1] == exported.sizes[-1]
    file = exported.load()
    for size in exported.sizes:
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            assert difference(file(x), model(x)) <= 1e-5


def test_weights_of_8_bits_keep_the_symmetry():
    """Turned copies of a filter are rounded alike, so that answers change under turns no more than in float32."""
    model = gcnn(dims=8)
    x = images(model, 8, 16)
    plain, small = (export_model(model, x, int8=int8, any_size=False) for int8 in (False, True))
    assert len(small.data) < 0.4 * len(plain.data) and plain.agreement is None and 0 <= small.agreement <= 1
    file = small.load()
    with torch.no_grad():
        rounding = difference(file(x), model(x))
        same = (file(x).argmax(1) == model(x).argmax(1)).float().mean().item()
    assert 1e-5 < rounding < 0.1 and same == small.agreement
    assert audit_model(file, x, "p4").worst("logits") <= 1e-4


class Unwritable(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x.flatten(1)[:, :4].reshape(-1, 2, 2))


def test_what_cannot_be_exported_is_refused_in_one_line():
    model, x = gcnn(), torch.zeros(2, 3, 8, 8)
    with pytest.raises(ExportError, match=r"Unwritable cannot be exported as onnx: it has no operation \w*[.]?\w*eig"):
        export_model(Unwritable(), x, any_size=False)
    for options, text in (
        ({"format": "tflite"}, "unknown format 'tflite'"),
        ({"format": "torch-export", "int8": True}, "ONNX"),
    ):
        with pytest.raises(ExportError, match=text):
            export_model(model, x, **options)
    with pytest.raises(ExportError, match="at least two images"):
        export_model(model, x[:1])


def test_the_command_exports_a_run(trained, tmp_path, capsys):
    out = tmp_path / "new" / "model.onnx"
    assert main(["export", str(trained), "--out", str(out), "--int8", "--fixed-size", "--samples", "21"]) == 0
    said = capsys.readouterr().out
    assert "of the predictions are the same" in said and "under p4 they change by" in said
    facts = json.loads(out.with_suffix(".json").read_text())
    assert facts["classes"] == ["dark", "bright", "striped"] and facts["exact_sizes"] == [facts["size"]]
    assert facts["input"]["shape"][:2] == ["batch", 1] and len(facts["normalisation"]["mean"]) == 1
    assert facts["compared"]["largest_difference"] <= 1e-5 and facts["audit"]["largest_error"] <= 1e-4
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.json", "model.onnx"]
    assert main(["audit", str(out), "--group", "p4", "--data.name", "arrays", "--data-root", str(trained.parent), "--samples",
                 "8", "--versions", "1", "--angle-images", "1", "--angle-step", "90", "--fail-above", "1e-4"]) == 0  # fmt: skip


def test_the_command_refuses_bad_input_and_writes_nothing(fails, tmp_path, monkeypatch):
    out = tmp_path / "here" / "model.onnx"
    small = ["gcnn_cifar", "--model.dims", "2", "--model.group", "p4", "--classes", "3"]
    assert "ends in .onnx" in fails("export", *small, "--size", "8", "--out", tmp_path / "model.pt2")
    assert "--size 28" in fails("export", *small, "--out", out)
    assert "no folder, file or model" in fails("export", "nothing", "--size", "8", "--out", out)
    assert "--samples must be at least 2" in fails("export", *small, "--size", "8", "--samples", "1", "--out", out)
    monkeypatch.setattr("revit.export._load", lambda *_: lambda x: torch.zeros(len(x), 3))
    assert "the file differs from the model" in fails("export", *small, "--size", "8", "--fixed-size", "--out", out)
    assert not out.parent.exists()


LARGEST_FILE = 1.1
"""Bytes of an ONNX file by those of its expanded float32 weights."""
SIZES = {"hier": 56, "pcam": 96, "re_resnet": 64, "vit_small": 32, "cifar": 32}
OPTIONS = {"vit_small_patch16": {"img_size": 32}}


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("revit_tiny", "gsa_rotmnist")]


@pytest.mark.parametrize("name", ["vit_tiny", *LONG])
def test_files_are_hardly_larger_than_their_weights(name):
    """Of trained models: no two norms are equal, so that none are written once for several."""
    model = randomised(create_model(name, in_chans=1)).eval()
    exported = export_model(model, images(model, 28, 2), any_size=False)
    assert len(exported.data) <= LARGEST_FILE * exported.weight_bytes and exported.difference <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_models() if "base" not in name and "medium" not in name])
def test_every_registered_model_exports_and_compiles(name):
    """At its registered size: ONNX, torch.export and torch.compile give what the model gives, and keep its symmetry."""
    odd = name.endswith("_paper") and "gcnn" not in name
    side = next((side for part, side in SIZES.items() if part in name), 28) + odd
    torch.manual_seed(0)
    options = {"group": "p4"} if not name.startswith(("vit", "cvt")) else {}
    model = create_model(name, **options, **OPTIONS.get(name, {})).eval()
    x = images(model, side, 2)
    for format in ("onnx", "torch-export"):
        exported = export_model(model, x, format=format, any_size=False)
        ratio = len(exported.data) / exported.weight_bytes
        print(f"\n{name} {format}: {len(exported.data):,} bytes, {ratio:.3f} of the weights, {exported.difference:.1e}")
        assert format != "onnx" or ratio <= LARGEST_FILE
        if options and name != "gcnn_cifar_paper":  # which is not exact at 32 pixels
            assert audit_model(exported.load(), x, "p4").worst("logits") <= 1e-4
    plain = model.deploy()
    for each in (model, plain):
        torch._dynamo.reset()
        with torch.no_grad():
            assert difference(torch.compile(each)(x), model(x)) <= 1e-5


@pytest.mark.parametrize("algorithm", ["relative", "fourier"])
def test_torch_compile_leaves_tables_to_python(algorithm):
    """A warning of the compiler, which caches cause, would be an error here. Models that are not deployed have tables."""
    if algorithm == "relative":
        model, size = create_model("gsa_rotmnist", group="p4", dims=6, num_heads=1, window_size=3), 22
    else:
        model, size = create_model("revit_tiny_paper", group="p8", in_chans=1, dims=4, depths=1, num_heads=1), 15
        set_algorithm(model, "fourier")
    x = images(model.eval(), size, 2)
    torch._dynamo.reset()
    with torch.no_grad():
        assert difference(torch.compile(model, backend="eager")(x), model(x)) <= 1e-5


def test_torch_compile_takes_deployed_models():
    """The graph is captured whole; the compiler itself (C++) is left to the slow test."""
    for name, size in (("gcnn_cifar", 8), ("gcnn_pcam", 66)):
        model = gcnn(name).deploy()
        x = images(model, size, 2)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
