"""ONNX files as subjects: small graphs with a known result, and every kind of file that is refused."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from revit.cli import model_files
from revit.evaluation.inference import evaluating, place_of
from tests.cli.test_subjects import WEIGHT, opened, refused


def onnx_file(name="net.onnx", *, shape=("n", 3, "h", "w"), dtype=np.float32, outputs=("y",), inputs=1, external=None, **other):
    """The means of the channels times WEIGHT. The output `logits` is twice that, `label` its argmax."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = onnx.numpy_helper.from_array(WEIGHT.astype(dtype), "weight")
    if external is not None:
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        entry = weight.external_data.add()
        entry.key, entry.value = "location", external
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["means"], axes=[*range(2, len(shape))], keepdims=0),
        helper.make_node("MatMul", ["means", "weight"], ["y"]),
    ]
    if "logits" in outputs:
        nodes.append(helper.make_node("Add", ["y", "y"], ["logits"]))
    if "label" in outputs:
        nodes.append(helper.make_node("ArgMax", ["y"], ["label"], axis=1))
    if "pooled_over_all" in outputs:
        nodes.append(helper.make_node("ReduceMean", ["y"], ["pooled_over_all"], keepdims=1))
    kinds = {"label": onnx.TensorProto.INT64}
    graph = helper.make_graph(
        other.get("nodes", nodes), "means",
        [helper.make_tensor_value_info("x" if i == 0 else f"x{i}", kind, shape) for i in range(inputs)],
        [helper.make_tensor_value_info(output, kinds.get(output, kind), None) for output in outputs],
        [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(model.SerializeToString())
    return name


TOLERANCE = {np.float16: 2e-3, np.float32: 1e-6, np.float64: 1e-14}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [("n", 3, "h", "w"), (None, 3, 6, 6), (1, 3, 6, 6), (4, 3, "h", "w"), (16, None, None, None)])
def test_onnx_gives_what_the_definition_gives(dtype, shape):
    """A fixed batch size is no limit: seven images come as seven rows, each with the result of its own image."""
    subject = opened(onnx_file(shape=shape, dtype=dtype))
    assert (subject.label, subject.group, subject.spec, subject.run) == ("net.onnx", None, None, None)
    x = torch.randn(7, 3, 6, 6, dtype=torch.float64)
    expected = x.mean((2, 3)) @ torch.from_numpy(WEIGHT)
    precision = torch.from_numpy(np.zeros(1, dtype)).dtype
    assert place_of(subject.model) == (torch.device("cpu"), precision)
    for asked in (torch.float64, torch.float32, precision):
        out = subject.model(x.to(asked))
        assert out.shape == (7, 2) and out.dtype == precision
    exact = subject.model(x).double()
    assert torch.allclose(exact, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    assert torch.allclose(subject.model(x.flip(0)).double(), exact.flip(0), rtol=0, atol=TOLERANCE[dtype])
    assert subject.model(x[:0]).shape == (0, 2) and subject.model(x[:1]).shape == (1, 2)
    with evaluating(subject.model):
        assert subject.model(x.transpose(2, 3)).shape == (7, 2)
    assert "net.onnx, x -> y" in repr(subject.model)


def test_onnx_output_called_logits_or_the_first():
    x = torch.randn(2, 3, 4, 4)
    plain = x.mean((2, 3)).double() @ torch.from_numpy(WEIGHT)
    for outputs, factor in ((("y",), 1), (("y", "logits"), 2), (("label", "logits"), 2), (("y", "label"), 1)):
        out = opened(onnx_file(outputs=outputs)).model(x)
        assert torch.allclose(out.double(), factor * plain, atol=1e-5)


def test_onnx_of_other_kinds():
    assert refused(onnx_file(outputs=("label",))) == (
        "net.onnx: its output label is tensor(int64); export it with float32, float16 or float64"
    )
    assert refused(onnx_file(shape=(1, 3, 4))).startswith("net.onnx: takes one input of images [B, C, H, W], this has x [1, 3")
    assert refused(onnx_file(inputs=2)).startswith("net.onnx: takes one input of images [B, C, H, W], this has x ['n', 3,")
    assert refused(onnx_file("sub/net.onnx", dtype=np.float32, nodes=[])).startswith(
        "sub/net.onnx: not an ONNX model that can be run ("
    )


def test_onnx_and_images_of_other_shapes():
    model = opened(onnx_file(shape=(2, 3, 4, 6))).model
    assert model.input_shape == (3, 4, 6) and model.batch == 2
    assert opened(onnx_file("any.onnx")).model.input_shape == (3, None, None)
    for shape, got in (((2, 3, 6, 4), "3 x 6 x 4"), ((2, 1, 4, 6), "1 x 4 x 6"), ((3, 4), "4")):
        with pytest.raises(ValueError, match=rf"^net\.onnx: takes images of 3 x 4 x 6 \(C x H x W\), got {got}; give it such"):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"^net\.onnx: fails on images \[2, 5, 4, 4\] \(.*dimension mismatch"):
        opened(onnx_file(shape=(None, None, None, None))).model(torch.zeros(2, 5, 4, 4))
    with pytest.raises(
        ValueError, match=r"output pooled_over_all has shape \[1, 1\] for 2 images; it must have a row for each"
    ):
        opened(onnx_file(outputs=("pooled_over_all",))).model(torch.zeros(2, 3, 4, 4))


def test_onnx_reads_weights_of_its_own_folder_only():
    WEIGHT.astype(np.float32).tofile("secret.bin")
    Path("in").mkdir()
    shutil.copy("secret.bin", "in/weights.bin")
    Path("in/link.bin").symlink_to("../secret.bin")
    x = torch.randn(2, 3, 4, 4)
    subject = opened(os.path.abspath(onnx_file("in/net.onnx", external="weights.bin")))
    assert subject.label == "net.onnx"  # reports are shared: they name no folder of this machine
    out = subject.model(x)
    assert torch.allclose(out.double(), x.mean((2, 3)).double() @ torch.from_numpy(WEIGHT), atol=1e-5)
    for location in ("../secret.bin", os.path.abspath("secret.bin"), "link.bin", "gone.bin"):
        message = refused(onnx_file("in/net.onnx", external=location))
        assert message.startswith("in/net.onnx: not an ONNX model that can be run (External data path validation failed")


def test_damaged_onnx(monkeypatch, capfd):
    data = Path(onnx_file()).read_bytes()
    for content in (b"hello world", data[: len(data) // 2], b"\0" * 100):
        Path("bad.onnx").write_bytes(content)
        assert refused("bad.onnx").startswith("bad.onnx: not an ONNX model that can be run (Load model from bad.onnx failed:")
    Path("bad.onnx").write_bytes(b"")
    assert refused("bad.onnx") == "bad.onnx: empty, it has 0 bytes; save or copy it again"
    assert refused("gone.onnx") == "gone.onnx: cannot be read (No such file or directory); check the name and its permissions"
    monkeypatch.setattr(model_files, "MAX_BYTES", 100)
    assert refused("net.onnx") == (
        f"net.onnx: {len(data)} bytes, more than the 100 that are read; use a smaller model"
    )  # fmt: skip
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_onnxruntime_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    Path("net.onnx").write_bytes(b"x")
    assert refused("net.onnx") == "onnxruntime is not installed; pip install 'revit-torch[export]'"
