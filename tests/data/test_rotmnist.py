"""Rotated MNIST: the official files, and what is rebuilt from MNIST, on small files of the same form."""

import hashlib
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from revit.data import DataError, DataOptions, open_dataset, rotmnist
from revit.data.digits import random_angles
from revit.data.mnist_files import IDX_NAMES, Mnist
from revit.data.rotation import turn_digits
from revit.data.rotmnist import TEST_AMAT, TRAIN_AMAT, Sizes, rebuild
from tests.data.test_amat import text
from tests.data.test_mnist_files import idx

SMALL = Sizes(train=10, val=2, test=50, mnist_train=60, mnist_test=10)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (62, 28, 28), dtype=np.uint8)
LABELS = RNG.integers(0, 10, 62)
AMAT = {
    TRAIN_AMAT: text(PIXELS[:12].reshape(12, 784) / 256, LABELS[:12]),
    TEST_AMAT: text(PIXELS[12:].reshape(50, 784) / 256, LABELS[12:]),
}
MNIST = {
    "train_images": RNG.integers(0, 256, (60, 28, 28), dtype=np.uint8),
    "train_labels": RNG.integers(0, 10, 60).astype(np.uint8),
    "test_images": RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "test_labels": RNG.integers(0, 10, 10).astype(np.uint8),
}
REBUILT = "by the protocol of Larochelle et al. 2007, seed 0"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(rotmnist, "SIZES", SMALL)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A zip of the official form, with its own checksum as the official one."""
    path = tmp_path / "mnist_rotation_new.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in AMAT.items():
            file.writestr(name, data)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setattr(rotmnist, "ROTMNIST", replace(rotmnist.ROTMNIST, md5=md5))
    return path


def open_in(folder, **options):
    return open_dataset(DataOptions("rotmnist", root=str(folder), **options))


def assert_official(dataset):
    for images, start, stop in ((dataset.train, 0, 10), (dataset.val, 10, 12), (dataset.test, 12, 62)):
        np.testing.assert_array_equal(images.read_many(np.arange(len(images)))[:, 0], PIXELS[start:stop])
        np.testing.assert_array_equal(images.labels, LABELS[start:stop])


def test_the_official_numbers():
    assert Sizes() == Sizes(10_000, 2_000, 50_000, 60_000, 10_000)
    assert rotmnist.ROTMNIST.md5 == "0f9a947ff3d30e95cd685462cbf3b847"


def test_official_archive(tmp_path, archive, monkeypatch):
    dataset = open_in(tmp_path)
    assert_official(dataset)
    spec = dataset.spec
    assert (spec.source, spec.mean, spec.std, spec.size) == ("official archive", (0.1307,), (0.3081,), (28, 28))
    assert [dataset.train.name(9), dataset.val.name(1), dataset.test.name(49)] == [
        "rotmnist/train/9",
        "rotmnist/val/1",
        "rotmnist/test/49",
    ]

    def never(*arguments):
        raise AssertionError("parsed again")

    monkeypatch.setattr(rotmnist, "read_amat", never)
    assert_official(open_in(tmp_path))
    archive.write_bytes(archive.read_bytes())  # another time of writing: not the file that was parsed
    with pytest.raises(AssertionError, match="parsed again"):
        open_in(tmp_path)


def test_unreadable_cache_is_made_again(tmp_path, archive, cache):
    open_in(tmp_path)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert_official(open_in(tmp_path))


@pytest.mark.parametrize("folder", [".", "mnist_rotation_new", "rotmnist"])
def test_unpacked_files(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, data in AMAT.items():
        (tmp_path / folder / name).write_bytes(data)
    dataset = open_in(tmp_path)
    assert_official(dataset)
    assert dataset.spec.source == "official archive, unpacked"


def test_archive_with_another_checksum(tmp_path, archive, refused):
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("more", "x")
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    with refused(archive, found, rotmnist.ROTMNIST.md5, "https://"):
        open_in(tmp_path)


def test_damaged_rows_name_the_member(tmp_path, archive, monkeypatch, refused):
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(TRAIN_AMAT, AMAT[TRAIN_AMAT])
        file.writestr(TEST_AMAT, AMAT[TEST_AMAT] + b"0 1 2\n")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(rotmnist, "ROTMNIST", replace(rotmnist.ROTMNIST, md5=md5))
    with refused(archive, TEST_AMAT, "line 51"):
        open_in(tmp_path)


def test_half_of_the_files(tmp_path, refused):
    (tmp_path / TRAIN_AMAT).write_bytes(AMAT[TRAIN_AMAT])
    with refused(tmp_path / TEST_AMAT, "no such file"):
        open_in(tmp_path)
    (tmp_path / TEST_AMAT).write_bytes(AMAT[TRAIN_AMAT])
    with refused(tmp_path / TEST_AMAT, "12 digits instead of the 50"):
        open_in(tmp_path)


def test_nothing_found(tmp_path, refused):
    ways = ["--data.download true", "https://www.iro.umontreal.ca/", "https://ossci-datasets.s3.amazonaws.com/mnist"]
    with refused(tmp_path, "mnist_rotation_new.zip", TRAIN_AMAT, TEST_AMAT, "mnist.npz", *IDX_NAMES[:1], *ways):
        open_in(tmp_path)


def test_official_comes_before_rebuilt(tmp_path, archive):
    np.savez(tmp_path / "mnist.npz", **MNIST)
    assert open_in(tmp_path).spec.source == "official archive"
    assert open_in(tmp_path, file="mnist.npz").spec.source == f"rebuilt from mnist.npz {REBUILT}"


def test_rebuilt_from_each_form(tmp_path, refused):
    np.savez(tmp_path / "mnist.npz", **MNIST)
    from_npz = open_in(tmp_path)
    (tmp_path / "mnist.npz").unlink()
    for name, array in zip(IDX_NAMES, MNIST.values(), strict=True):
        (tmp_path / name).write_bytes(idx(array))
    from_idx = open_in(tmp_path)
    assert from_npz.spec.source == f"rebuilt from mnist.npz {REBUILT}"
    assert from_idx.spec.source == f"rebuilt from MNIST's idx files {REBUILT}"
    for part in ("train", "val", "test"):
        np.testing.assert_array_equal(from_npz.split(part).images, from_idx.split(part).images)
        np.testing.assert_array_equal(from_npz.split(part).labels, from_idx.split(part).labels)
    assert [len(from_npz.split(part)) for part in ("train", "val", "test")] == [10, 2, 50]
    assert open_in(tmp_path, file=IDX_NAMES[0]).spec == from_idx.spec
    (tmp_path / "notes.txt").write_text("")
    with refused("notes.txt", "mnist_rotation_new.zip", "mnist.npz"):
        open_in(tmp_path, file="notes.txt")


def digit_numbers(images):
    """Which digit of MNIST each image is: (part, number)."""
    known = {image.tobytes(): (part, i) for part in ("train", "test") for i, image in enumerate(MNIST[f"{part}_images"])}
    return [known[image.tobytes()] for image in images]


def test_protocol(monkeypatch):
    mnist = Mnist(**MNIST, source="mnist.npz")
    turned = rebuild(mnist, 0, SMALL)
    monkeypatch.setattr(rotmnist, "random_angles", lambda count, seed: np.zeros(count))
    upright = rebuild(mnist, 0, SMALL)
    train, test = digit_numbers(upright["train_images"]), digit_numbers(upright["test_images"])
    assert len(set(train + test)) == 62  # no digit twice
    assert {part for part, _ in train} == {"train"}
    assert {number for part, number in test if part == "test"} == set(range(10))  # all test digits of MNIST
    assert {part for part, _ in test[:25]} == {part for part, _ in test[25:]} == {"train", "test"}  # mixed
    for name, digits in (("train", train), ("test", test)):
        assert upright[f"{name}_labels"].tolist() == [MNIST[f"{part}_labels"][number] for part, number in digits]
        np.testing.assert_array_equal(turned[f"{name}_labels"], upright[f"{name}_labels"])
    angles = random_angles(62, 0)
    np.testing.assert_array_equal(turned["train_images"], turn_digits(upright["train_images"], angles[:12]))
    np.testing.assert_array_equal(turned["test_images"], turn_digits(upright["test_images"], angles[12:]))


def test_seed_decides():
    mnist = Mnist(**MNIST, source="mnist.npz")
    first, again, other = (rebuild(mnist, seed, SMALL)["train_images"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_rebuilt_is_kept_for_this_mnist_only(tmp_path, monkeypatch):
    np.savez(tmp_path / "mnist.npz", **MNIST)
    before = open_in(tmp_path)

    def never(*arguments):
        raise AssertionError("rebuilt again")

    monkeypatch.setattr(rotmnist, "rebuild", never)
    np.testing.assert_array_equal(open_in(tmp_path).test.images, before.test.images)
    np.savez(tmp_path / "mnist.npz", **(MNIST | {"test_labels": 9 - MNIST["test_labels"]}))
    with pytest.raises(AssertionError, match="rebuilt again"):
        open_in(tmp_path)


def test_part_of_mnist_is_refused(tmp_path, refused):
    np.savez(
        tmp_path / "mnist.npz",
        **(MNIST | {"train_images": MNIST["train_images"][:59], "train_labels": MNIST["train_labels"][:59]}),
    )
    with refused("mnist.npz", "59 and 10 digits instead of MNIST's 60 and 10"):
        open_in(tmp_path)


def test_download(tmp_path, archive, monkeypatch, refused):
    fetched = []

    def fetch(remote, folder):
        fetched.append(remote.name)
        if remote.name.endswith(".zip"):
            if len(fetched) > 1:
                raise DataError(f"{remote.url}: no complete answer")
            return archive
        (folder / remote.name).write_bytes(
            idx(MNIST[f"{'train' if 'train' in remote.name else 'test'}_{remote.name.split('-')[1]}"])
        )
        return folder / remote.name

    monkeypatch.setattr(rotmnist, "fetch", fetch)
    assert_official(open_in(tmp_path / "new", download=True))
    assert fetched == ["mnist_rotation_new.zip"]
    with refused("no complete answer", "rebuild it from MNIST: add --data.file train-images-idx3-ubyte.gz"):
        open_in(tmp_path / "other", download=True)
    dataset = open_in(tmp_path / "other", download=True, file="train-images-idx3-ubyte.gz")
    assert dataset.spec.source == f"rebuilt from MNIST's idx files {REBUILT}" and len(fetched) == 6
