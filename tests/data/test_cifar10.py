"""CIFAR-10 in each of its forms, with ten images a batch."""

import io
import tarfile

import numpy as np
import pytest

from revit.data import DataOptions, cifar10, open_dataset
from revit.data.cifar10 import BATCHES, BINARY, CLASSES, UNPACKED
from tests.data.test_cifar_batches import python2_pickle

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (60, 3072), dtype=np.uint8)
LABELS = np.concatenate([RNG.permutation(10) for _ in range(6)])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 10)


def files(form):
    """The six batches by name."""
    parts = [(PIXELS[10 * i : 10 * i + 10], LABELS[10 * i : 10 * i + 10]) for i in range(6)]
    if form == "py":
        return {name: python2_pickle(x, y.tolist()) for name, (x, y) in zip(BATCHES, parts, strict=True)}
    return {name: np.column_stack((y, x)).astype(np.uint8).tobytes() for name, (x, y) in zip(BINARY, parts, strict=True)}


def write(folder, form):
    folder.mkdir(exist_ok=True)
    for name, data in files(form).items():
        (folder / name).write_bytes(data)
    (folder / "batches.meta").write_bytes(b"never read")


def write_tar(path, form, skip=()):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files(form).items():
            if name not in skip:
                info = tarfile.TarInfo(f"cifar-10-batches-{form}/{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def open_in(folder, **options):
    return open_dataset(DataOptions("cifar10", root=str(folder), val_fraction=0.2, **options))


def assert_same(dataset):
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [40, 10, 10]
    assert np.bincount(dataset.val.labels).tolist() == [1] * 10
    for images, start in ((dataset.train, 0), (dataset.val, 0), (dataset.test, 50)):
        for i in range(len(images)):
            number = start + int(images.name(i).rpartition("/")[2])
            np.testing.assert_array_equal(images.read(i), PIXELS[number].reshape(3, 32, 32))
            assert images.labels[i] == LABELS[number]
    names = [images.name(i) for images in (dataset.train, dataset.val) for i in range(len(images))]
    assert len(set(names)) == 50
    spec = dataset.spec
    assert (spec.classes, spec.mean, spec.std) == (CLASSES, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def test_order_of_the_classes():
    assert CLASSES[0] == "airplane" and CLASSES[3:6] == ("cat", "deer", "dog") and CLASSES[9] == "truck" and len(CLASSES) == 10


@pytest.mark.parametrize("form", ["py", "bin"])
@pytest.mark.parametrize("below", [True, False], ids=["below the root", "root"])
def test_unpacked(tmp_path, form, below):
    folder = tmp_path / f"cifar-10-batches-{form}"
    write(folder, form)
    dataset = open_in(tmp_path if below else folder)
    assert_same(dataset)
    assert dataset.spec.source == f"cifar-10-batches-{form}: 40 train, 10 validation and 10 test images"


@pytest.mark.parametrize(("name", "form"), [("cifar-10-python.tar.gz", "py"), ("cifar-10-binary.tar.gz", "bin")])
def test_archive(tmp_path, name, form):
    write_tar(tmp_path / name, form)
    dataset = open_in(tmp_path)
    assert_same(dataset)
    assert dataset.spec.source.startswith(f"{name}: ")


def test_npz(tmp_path):
    pixels = PIXELS.reshape(60, 3, 32, 32).transpose(0, 2, 3, 1)
    arrays = {"train_images": pixels[:50], "train_labels": LABELS[:50], "test_images": pixels[50:], "test_labels": LABELS[50:]}
    np.savez(tmp_path / "cifar10_small.npz", **arrays)
    dataset = open_in(tmp_path)
    assert_same(dataset)
    assert dataset.spec.source == "cifar10_small.npz: 40 train, 10 validation and 10 test images"
    (tmp_path / "cifar10_small.npz").rename(tmp_path / "other.npz")
    assert_same(open_in(tmp_path, file="other.npz"))
    assert_same(open_dataset(DataOptions("cifar10", file=str(tmp_path / "other.npz"), val_fraction=0.2)))


def test_npz_of_something_else(tmp_path, refused):
    pixels = PIXELS.reshape(60, 32, 32, 3)
    arrays = {"train_images": pixels[:50], "train_labels": LABELS[:50], "test_images": pixels[50:], "test_labels": LABELS[50:]}
    path = tmp_path / "cifar10.npz"
    for change, words in (
        ({"train_images": pixels[:50, :28, :28], "test_images": pixels[50:, :28, :28]}, ["3 x 28 x 28", "has 3 x 32 x 32"]),
        ({"train_labels": np.full(50, 10)}, ["train_labels has label 10"]),
        ({"train_labels": np.full(50, 9)}, ["no image of class 0"]),
        ({"classes": np.array(["a", "b"])}, ["classes are not those of cifar10", "--data.name arrays"]),
    ):
        np.savez(path, **(arrays | change))
        with refused(path, *words):
            open_in(tmp_path)


def test_missing_and_damaged_batches(tmp_path, refused):
    write(tmp_path / UNPACKED[0], "py")
    folder = tmp_path / UNPACKED[0]
    (folder / "data_batch_2").write_bytes(files("py")["data_batch_2"][:1000])
    with refused(folder / "data_batch_2", "download it again"):
        open_in(tmp_path)
    (folder / "data_batch_2").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    with refused(folder / "data_batch_2", "asks for 'os'.'system'"):
        open_in(tmp_path)
    (folder / "data_batch_2").unlink()
    (folder / "test_batch").unlink()
    with refused(folder, "lacks data_batch_2, test_batch"):
        open_in(tmp_path)


def test_damaged_archive(tmp_path, refused):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_tar(path, "bin", skip=("data_batch_4.bin",))
    with refused(path, "lacks data_batch_4.bin"):
        open_in(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with refused(path, "cannot be read"):
        open_in(tmp_path)


def test_nothing_there(tmp_path, refused):
    with refused(tmp_path, *UNPACKED, "cifar-10-binary.tar.gz", "cifar10*.npz", "--data.download true", "https://"):
        open_in(tmp_path)
    with refused("--data-root"):
        open_dataset(DataOptions("cifar10"))


def test_download(tmp_path, cache, monkeypatch):
    def fetch(remote, folder):
        write_tar(folder / remote.name, "bin")
        return folder / remote.name

    monkeypatch.setattr(cifar10, "fetch", fetch)
    assert_same(open_in(tmp_path / "new", download=True))
    assert_same(open_dataset(DataOptions("cifar10", download=True, val_fraction=0.2)))  # no root: the cache folder
    assert (cache / "downloads" / "cifar10" / "cifar-10-binary.tar.gz").is_file()
