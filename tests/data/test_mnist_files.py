"""MNIST in the forms people have it."""

import gzip
import struct

import numpy as np
import pytest

from revit.data import mnist_files
from revit.data.mnist_files import IDX_NAMES, find_mnist, read_idx, read_mnist_idx, read_mnist_npz

RNG = np.random.default_rng(0)
ARRAYS = {
    "train_images": RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8),
    "train_labels": np.array([0, 1, 2, 9, 4, 5], np.uint8),
    "test_images": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "test_labels": np.array([7, 8, 9], np.uint8),
}
KERAS = dict(zip(("x_train", "y_train", "x_test", "y_test"), ARRAYS.values(), strict=True))


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, names=IDX_NAMES, pack=lambda data: data):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(names, ARRAYS.values(), strict=True):
        (folder / name).write_bytes(pack(idx(array)))


def assert_same(mnist):
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(getattr(mnist, key), array)
        assert getattr(mnist, key).dtype == np.uint8


@pytest.mark.parametrize("keys", [ARRAYS, KERAS], ids=["ours", "keras"])
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
def test_npz(tmp_path, keys, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    np.savez(tmp_path / folder / "mnist.npz", **keys)
    mnist = find_mnist(tmp_path)
    assert_same(mnist)
    assert mnist.source == "mnist.npz"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("dotted", [False, True], ids=["dash", "dot"])
def test_idx(tmp_path, packed, dotted):
    names = [(name.replace("-idx", ".idx") if dotted else name) + (".gz" if packed else "") for name in IDX_NAMES]
    write_idx(tmp_path / "mnist", names, gzip.compress if packed else bytes)
    mnist = find_mnist(tmp_path)
    assert_same(mnist)
    assert mnist.source == "MNIST's idx files"


def test_nothing_there(tmp_path, refused):
    assert find_mnist(tmp_path) is None
    write_idx(tmp_path)
    (tmp_path / IDX_NAMES[1]).unlink()
    (tmp_path / IDX_NAMES[2]).unlink()
    with refused(tmp_path, "lacks train-labels-idx1-ubyte, t10k-images-idx3-ubyte"):
        find_mnist(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["begins with nothing instead of 00000803"]),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01\x05", ["begins with 00000801 instead of 00000803"]),
        (idx(np.zeros((1, 28, 28)))[:2] + b"\x0d" + idx(np.zeros((1, 28, 28)))[3:], ["begins with 00000d03"]),
        (idx(ARRAYS["train_images"])[:9], ["not this file of MNIST"]),
        (idx(ARRAYS["train_images"])[:-1], ["says shape [6, 28, 28] but holds 4,703 bytes instead of 4,704"]),
        (idx(ARRAYS["train_images"]) + b"\x00", ["holds 4,705 bytes instead of 4,704"]),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), ["holds 0 bytes instead of"]),
        (gzip.compress(idx(ARRAYS["train_images"]))[:-20], ["cannot be read", "download it again"]),
    ],
    ids=["empty", "labels", "float", "short header", "short", "long", "huge", "short gzip"],
)
def test_idx_is_strict(tmp_path, refused, data, words):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    with refused(tmp_path / "train-images-idx3-ubyte", *words):
        read_idx(tmp_path / "train-images-idx3-ubyte", 3)


def test_idx_size_limit(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(mnist_files, "MAX_BYTES", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(np.zeros((6, 28, 28), np.uint8))))
    with refused("a.gz", "more than 1,000 bytes"):
        read_idx(tmp_path / "a.gz", 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_images": np.zeros((6, 27, 28), np.uint8)}, ["train images are [6, 27, 28] of uint8"]),
        ({"test_images": np.zeros((3, 28, 28))}, ["test images are [3, 28, 28] of float64"]),
        ({"test_labels": np.zeros(4, int)}, ["3 test images, but labels of shape [4]"]),
        ({"test_labels": np.zeros(3)}, ["type float64"]),
        ({"train_labels": np.full(6, 10)}, ["train labels go from 10 to 10", "0 to 9"]),
        ({"test_labels": np.array([None] * 3)}, ["test_labels holds Python objects"]),
    ],
)
def test_npz_is_checked(tmp_path, refused, change, words):
    np.savez(tmp_path / "mnist.npz", **(ARRAYS | change))
    with refused(tmp_path / "mnist.npz", *words):
        read_mnist_npz(tmp_path / "mnist.npz")


def test_npz_of_something_else(tmp_path, refused):
    np.savez(tmp_path / "mnist.npz", a=np.zeros(3))
    with refused("mnist.npz", "neither train_images", "x_train"):
        read_mnist_npz(tmp_path / "mnist.npz")


def test_lengths_of_idx_must_agree(tmp_path, refused):
    write_idx(tmp_path)
    (tmp_path / IDX_NAMES[1]).write_bytes(idx(np.zeros(5, np.uint8)))
    with refused(tmp_path, "6 train images, but labels of shape [5]"):
        read_mnist_idx(tmp_path)
