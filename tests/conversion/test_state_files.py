"""Files of others: nothing in them runs, and whatever is not a state dict is refused in one line."""

import os
import zipfile

import pytest
import torch

from revit.conversion import ConversionError
from revit.conversion.state_files import read_state_dict

GOOD = {"a.weight": torch.arange(6.0).view(2, 3), "a.steps": torch.tensor(3)}


def save(path, content, **options):
    torch.save(content, path, **options)
    return path


def refused(path):
    with pytest.raises(ConversionError) as caught:
        read_state_dict(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and "weights_only=False" not in text
    return text


def test_state_dict_alone_and_in_a_checkpoint(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None}]}
    saved = {"epoch": 41, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer, "loss": 0.5}
    tensors, epoch = read_state_dict(save(tmp_path / "checkpoint", saved))  # the released code gives no suffix
    assert epoch == 41 and tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())
    tensors, epoch = read_state_dict(save(tmp_path / "alone.pth", GOOD))
    assert epoch == 0 and torch.equal(tensors["a.weight"], GOOD["a.weight"])
    assert read_state_dict(save(tmp_path / "odd.pt", {"epoch": "last", "model_state_dict": GOOD}))[1] == 0


class Command:
    """Unpickling this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_is_not_run(tmp_path):
    made = tmp_path / "made"
    for number, content in enumerate(
        [Command(made), {"a": Command(made)}, {"model_state_dict": GOOD, "scheduler": Command(made)}]
    ):
        text = refused(save(tmp_path / f"{number}.pt", content))
        assert "holds more than tensors" in text and "posix.mkdir" in text
    assert "holds more than tensors" in refused(save(tmp_path / "module.pt", torch.nn.Linear(2, 2)))
    assert not made.exists()


def test_other_formats(tmp_path):
    assert "cannot be read" in refused(tmp_path / "missing.pt")
    assert "not a regular file" in refused(tmp_path)
    (tmp_path / "text.pt").write_text("weights")
    assert "not a file of torch.save" in refused(tmp_path / "text.pt")
    assert "not a file of torch.save" in refused(save(tmp_path / "old.pt", GOOD, _use_new_zipfile_serialization=False))
    whole = save(tmp_path / "whole.pt", GOOD).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    assert "cut short" in refused(tmp_path / "cut.pt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("folder/readme.txt", "hello")
    assert "none of torch.save" in refused(tmp_path / "other.zip")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("m/constants.pkl", b"")
        archive.writestr("m/data.pkl", b"")
    assert "TorchScript" in refused(tmp_path / "script.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as archive,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    assert "compressed" in refused(tmp_path / "z.pt")


def test_damaged_content(tmp_path):
    """The pickle is replaced by other bytes: an error, never a crash."""
    whole = save(tmp_path / "whole.pt", GOOD)
    for number, content in enumerate([b"", b"\x80\x02", b"\x80\x02]q\x00.", os.urandom(200), b"(" * 5000 + b"."]):
        path = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(path, "w") as changed:
            for name in archive.namelist():
                changed.writestr(name, content if name.endswith("data.pkl") else archive.read(name))
        refused(path)


def test_tensors_that_are_not_in_the_file(tmp_path):
    """Shapes that claim more than there is, by strides of 0 or by a storage that is too short."""
    claimed = torch.zeros(1).expand(10**6, 10**6)
    assert "no ordinary tensor" in refused(save(tmp_path / "expanded.pt", {"a": claimed}))
    assert "no ordinary tensor" in refused(save(tmp_path / "meta.pt", {"a": torch.zeros(4, device="meta")}))
    assert "no ordinary tensor" in refused(save(tmp_path / "sparse.pt", {"a": torch.eye(3).to_sparse()}))
    path = save(tmp_path / "long.pt", {"a": torch.zeros(10**6)})
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "short.pt", "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            changed.writestr(name, content[:4] if "/data/" in name else content)
    refused(tmp_path / "short.pt")


def test_changed_numbers_are_noticed(tmp_path):
    path = save(tmp_path / "whole.pt", {"a": torch.full((64,), 2.0)})
    path.write_bytes(
        path.read_bytes().replace(torch.full((64,), 2.0).numpy().tobytes(), torch.full((64,), 3.0).numpy().tobytes())
    )
    assert "damaged" in refused(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [([torch.zeros(2)], "holds a list"), ({1: torch.zeros(2)}, "a int stands where"), ({"a": "text"}, "a is a str"),
     ({"model_state_dict": {}}, "empty"), ({"model_state_dict": [1]}, "no dict"), (torch.zeros(2), "holds a Tensor")],
)  # fmt: skip
def test_other_contents(tmp_path, content, text):
    assert text in refused(save(tmp_path / "file.pt", content))
