"""Arrays in .npz files: only plain ones, only those asked for, and never more memory than the file says."""

import io
import zipfile

import numpy as np
import pytest

from revit.data import npz
from revit.data.npz import file_identity, keep_arrays, load_arrays, read_arrays


class Canary:
    """Pickled, it would make a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def with_member(path, name, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
    return path


def test_named_arrays_only(tmp_path):
    path = tmp_path / "a.npz"
    arrays = {"a": np.arange(6).reshape(2, 3), "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "s": np.array(["x", "yz"])}
    np.savez_compressed(path, **arrays, other=np.zeros(3))
    read = read_arrays(path, ("a", "f", "s", "missing"))
    assert sorted(read) == ["a", "f", "s"]
    for key, array in arrays.items():
        np.testing.assert_array_equal(read[key], array)


def test_pickles_are_not_loaded(tmp_path, refused):
    path, canary = tmp_path / "a.npz", tmp_path / "canary"
    np.savez(path, a=np.array([Canary(canary)], dtype=object))
    np.load(path, allow_pickle=True)["a"][0].close()
    assert canary.exists()  # so this payload works where it is let in
    canary.unlink()
    with refused("a.npz", "a holds Python objects"):
        read_arrays(path, ("a",))
    assert read_arrays(path, ("b",)) == {}
    assert not canary.exists()


def test_header_must_tell_the_truth(tmp_path, refused):
    data = npy(np.zeros((2, 3), np.uint8))
    lie = data.replace(b"(2, 3), }          ", b"(2, 3000000000000)}")
    assert len(lie) == len(data) and lie != data
    with refused("a.npz", "a says shape [2, 3000000000000]"):
        read_arrays(with_member(tmp_path / "a.npz", "a.npy", lie), ("a",))
    with refused("a.npz", "a says shape [2, 3]"):
        read_arrays(with_member(tmp_path / "a.npz", "a.npy", data[:-1]), ("a",))
    twice_negative = data.replace(b"(2, 3), }  ", b"(-2, -3), }")
    with refused("a.npz", "cannot be read"):
        read_arrays(with_member(tmp_path / "a.npz", "a.npy", twice_negative), ("a",))
    with refused("a.npz", "format (3, 0)"):
        read_arrays(with_member(tmp_path / "a.npz", "a.npy", data[:6] + b"\x03" + data[7:]), ("a",))


@pytest.mark.parametrize("content", [b"", b"no zip", npy(np.zeros(3))], ids=["empty", "text", "npy"])
def test_other_files(tmp_path, refused, content):
    (tmp_path / "a.npz").write_bytes(content)
    with refused("a.npz", "cannot be read", "numpy.savez"):
        read_arrays(tmp_path / "a.npz", ("a",))


def test_damaged_members(tmp_path, refused):
    path = tmp_path / "a.npz"
    for content in (b"", b"\x93NUMPY", b"no array at all", b"\x93NUMPY\x01\x00\x76\x00{'descr': nonsense"):
        with refused("a.npz", "cannot be read"):
            read_arrays(with_member(path, "a.npy", content), ("a",))
    np.savez(path, a=np.arange(1000))
    data = bytearray(path.read_bytes())
    data[2000] ^= 0xFF
    path.write_bytes(data)
    with refused("a.npz", "cannot be read (Bad CRC-32"):
        read_arrays(path, ("a",))


def test_size_limit(tmp_path, refused, monkeypatch):
    np.savez(tmp_path / "a.npz", a=np.zeros(1000))
    monkeypatch.setattr(npz, "MAX_BYTES", 8000)
    with refused("a.npz", "claims 8,128 bytes"):
        read_arrays(tmp_path / "a.npz", ("a",))


def test_kept_arrays_come_back_only_as_expected(cache):
    expected = {"a": ((2, 3), np.uint8)}
    assert load_arrays("kept.npz", expected) is None
    keep_arrays("kept.npz", {"a": np.ones((2, 3), np.uint8)})
    loaded = load_arrays("kept.npz", expected)
    assert loaded is not None and loaded["a"].sum() == 6
    assert load_arrays("kept.npz", {"a": ((3, 2), np.uint8)}) is None
    assert load_arrays("kept.npz", {"a": ((2, 3), np.int64)}) is None
    assert load_arrays("kept.npz", {"b": ((2, 3), np.uint8)}) is None
    (cache / "kept.npz").write_bytes((cache / "kept.npz").read_bytes()[:-5])
    assert load_arrays("kept.npz", expected) is None


def test_cache_that_cannot_be_written(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("REVIT_CACHE", str(cache / "file"))
    keep_arrays("kept.npz", {"a": np.ones(3)})
    assert load_arrays("kept.npz", {"a": ((3,), np.float64)}) is None


def test_identity_follows_the_content(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    before = file_identity(path)
    assert file_identity(path) == before
    path.write_text("longer")
    assert file_identity(path) != before
