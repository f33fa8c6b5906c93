"""PatchCamelyon: HDF5 files read image by image, in any process."""

import builtins
import gzip
import multiprocessing
import os
import pickle

import h5py
import numpy as np
import pytest
from torch.utils.data import DataLoader

from revit.data import BadImage, Crop, DataOptions, open_dataset, pcam
from revit.data.download import PCAM
from revit.data.pcam import HDF5Images

RNG = np.random.default_rng(0)
COUNTS = {"train": 6, "valid": 4, "test": 2}
X = {part: RNG.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8) for part, count in COUNTS.items()}
Y = {part: (np.arange(count) % 2).astype(np.uint8).reshape(-1, 1, 1, 1) for part, count in COUNTS.items()}


def path_of(folder, part, kind):
    return folder / f"camelyonpatch_level_2_split_{part}_{kind}.h5"


def write(folder, part, kind, array, key=None):
    folder.mkdir(exist_ok=True)
    with h5py.File(path_of(folder, part, kind), "w") as file:
        file[key or kind] = array
    return path_of(folder, part, kind)


@pytest.fixture
def root(tmp_path):
    for part in COUNTS:
        write(tmp_path, part, "x", X[part])
        write(tmp_path, part, "y", Y[part])
    return tmp_path


def open_in(folder, **options):
    return open_dataset(DataOptions("pcam", root=str(folder), **options))


def assert_same(dataset):
    for images, part in ((dataset.train, "train"), (dataset.val, "valid"), (dataset.test, "test")):
        assert len(images) == COUNTS[part]
        assert images.labels.dtype == np.int64 and images.labels.tolist() == Y[part].ravel().tolist()
        for i in range(len(images)):
            np.testing.assert_array_equal(images.read(i), X[part][i].transpose(2, 0, 1))


def test_splits(root):
    dataset = open_in(root)
    assert_same(dataset)
    spec = dataset.spec
    assert (spec.classes, spec.size, spec.channels) == (("normal", "tumor"), (96, 96), 3)
    assert (spec.mean, spec.std) == ((0.701, 0.538, 0.692), (0.235, 0.277, 0.213))
    assert spec.source == "camelyonpatch_level_2: 6 train, 4 validation and 2 test images"
    assert (dataset.val.name(3), dataset.test.name(0)) == ("pcam/val/3", "pcam/test/0")
    assert dataset.train.read(0, Crop(area=0.2, aspect=0.5, top=0.5, left=0.5)).shape == (3, 96, 96)


def test_folder_of_torchvision(root):
    (root / "pcam").mkdir()
    for path in root.glob("*.h5"):
        path.rename(root / "pcam" / path.name)
    assert_same(open_in(root))


def test_flat_labels(root):
    write(root, "test", "y", Y["test"].ravel())
    assert_same(open_in(root))


def test_gzipped_files_are_unpacked_beside(root):
    for path in list(root.glob("*.h5")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    assert_same(open_in(root))
    assert len(list(root.glob("*.h5"))) == 6
    assert_same(open_in(root))


def test_damaged_gzip(root, refused):
    path = path_of(root, "valid", "x")
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1)[:-100])
    path.unlink()
    with refused(f"{path}.gz", "cannot be read"):
        open_in(root)
    assert not path.exists()


def read_one(images):
    return images.read(1).sum()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_open_the_file_themselves(root, method):
    images = open_in(root).train
    images.read(0)  # the parent has the file open
    context = multiprocessing.get_context(method)
    if method == "fork":

        def collate(batch):
            total = int(images.read(batch[0]).sum())
            return total, images._process == os.getpid() != parent

        parent = os.getpid()
        assert list(DataLoader(range(6), collate_fn=collate, num_workers=2)) == [(int(x.sum()), True) for x in X["train"]]
    else:
        with context.Pool(1) as pool:
            assert pool.apply(read_one, (images,)) == X["train"][1].sum()
    np.testing.assert_array_equal(images.read(2), X["train"][2].transpose(2, 0, 1))


def test_pickled_without_its_handle(root):
    images = open_in(root).train
    images.read(0)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(images)).read(1), images.read(1))


@pytest.mark.parametrize(
    ("kind", "array", "words"),
    [
        ("x", np.zeros((4, 96, 96), np.uint8), ["x is [4, 96, 96] of uint8", "uint8 [N, 96, 96, 3]"]),
        ("x", np.zeros((4, 32, 32, 3), np.uint8), ["x is [4, 32, 32, 3]"]),
        ("x", np.zeros((4, 96, 96, 3), np.float32), ["of float32"]),
        ("x", np.zeros((3, 96, 96, 3), np.uint8), ["3 images, but camelyonpatch_level_2_split_valid_y.h5 has 4 labels"]),
        ("x", np.zeros((0, 96, 96, 3), np.uint8), ["'x' has shape [0, 96, 96, 3]"]),
        ("x", np.uint8(3), ["x is [] of uint8"]),
        ("y", np.zeros((4, 2), np.uint8), ["y is [4, 2] of uint8"]),
        ("y", np.zeros(4), ["y is [4] of float64"]),
        ("y", np.array([0, 1, 2, 1]), ["labels must be 0 (normal) or 1 (tumor), got 0, 1, 2"]),
        ("y", np.array([0, -1, 0, 1]), ["got -1, 0, 1"]),
        ("y", np.zeros(0, np.uint8), ["'y' has shape [0]"]),
    ],
)
def test_wrong_content(root, refused, kind, array, words):
    with refused(write(root, "valid", kind, array), "download", *words):
        open_in(root)


def test_missing_keys(root, refused):
    with refused(write(root, "test", "x", X["test"], key="images"), "no dataset 'x', only images"):
        open_in(root)
    with h5py.File(path_of(root, "test", "x"), "w") as file:
        file.create_group("x")
    with refused(path_of(root, "test", "x"), "no dataset 'x', only x"):
        open_in(root)


def test_other_files_are_not_read_through_hdf5(root, tmp_path, refused):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(2 * 96 * 96 * 3))
    with h5py.File(path_of(root, "test", "x"), "w") as file:
        file.create_dataset("x", (2, 96, 96, 3), np.uint8, external=[(str(secret), 0, 2 * 96 * 96 * 3)])
    with refused(path_of(root, "test", "x"), "names other files"):
        open_in(root)
    with h5py.File(path_of(root, "test", "x"), "w") as file:
        file["x"] = h5py.ExternalLink(str(path_of(root, "train", "x")), "x")
    with refused(path_of(root, "test", "x"), "no dataset 'x'"):
        open_in(root)


@pytest.mark.parametrize("content", [b"", b"not HDF5", None], ids=["empty", "text", "truncated"])
def test_damaged_file(root, refused, content):
    path = path_of(root, "train", "x")
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with refused(path, "cannot be read", "download it again"):
        open_in(root)


def test_damaged_image(root):
    with h5py.File(path_of(root, "test", "x"), "w") as file:
        file.create_dataset("x", data=X["test"], chunks=(1, 96, 96, 3), compression="gzip")
        start = file["x"].id.get_chunk_info(1).byte_offset
    data = bytearray(path_of(root, "test", "x").read_bytes())
    data[start : start + 100] = bytes(100)
    path_of(root, "test", "x").write_bytes(data)
    images = open_in(root).test
    np.testing.assert_array_equal(images.read(0), X["test"][0].transpose(2, 0, 1))
    with pytest.raises(BadImage, match="pcam/test/1: cannot be read from .*test_x.h5") as caught:
        images.read(1)
    assert "\n" not in str(caught.value)


def test_npz_in_its_place(tmp_path, refused):
    labels = {"train_labels": Y["train"].ravel(), "test_labels": Y["test"].ravel(), "val_labels": Y["valid"].ravel()}
    np.savez(tmp_path / "pcam_small.npz", train_images=X["train"], test_images=X["test"], val_images=X["valid"], **labels)
    dataset = open_in(tmp_path)
    assert_same(dataset)
    assert dataset.spec.source == "pcam_small.npz: 6 train, 4 validation and 2 test images"
    (tmp_path / "pcam_small.npz").rename(tmp_path / "other.npz")
    assert_same(open_in(tmp_path, file="other.npz"))
    small = {f"{part}_images": X[part][:, :32, :32] for part in ("train", "test")}
    np.savez(tmp_path / "other.npz", **small, train_labels=labels["train_labels"], test_labels=labels["test_labels"])
    with refused("other.npz", "3 x 32 x 32", "pcam has 3 x 96 x 96"):
        open_in(tmp_path, file="other.npz")


def test_missing_files(root, tmp_path, refused):
    path = path_of(root, "valid", "y")
    path.unlink()
    with refused(path, "no such file", "split_{train,valid,test}_{x,y}.h5", "https://zenodo.org", "--data.download true"):
        open_in(root)
    (tmp_path / "empty").mkdir()
    with refused(path_of(tmp_path / "empty", "train", "x"), "no such file", "pcam*.npz"):
        open_in(tmp_path / "empty")


def test_download_fetches_what_is_missing(root, monkeypatch):
    data = path_of(root, "valid", "y").read_bytes()
    path_of(root, "valid", "y").unlink()
    fetched = []

    def fetch(remote, folder):
        fetched.append(remote)
        (folder / remote.name).write_bytes(gzip.compress(data))

    monkeypatch.setattr(pcam, "fetch", fetch)
    assert_same(open_in(root, download=True))
    assert fetched == [PCAM[3]]


def test_missing_package(root, monkeypatch, refused):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "h5py":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with refused("h5py", "pip install 'revit-torch[train]'"):
        HDF5Images(path_of(root, "train", "x"), path_of(root, "train", "y"), "pcam/train")
