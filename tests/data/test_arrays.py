"""Images in memory and anybody's .npz."""

import numpy as np
import pytest

from revit.data import Crop, DataError, DataOptions, open_dataset
from revit.data.arrays import ArrayImages, hold_out, read_npz
from revit.data.resize import crop_and_resize

RNG = np.random.default_rng(0)


def content(kinds=3, train=8, test=2, shape=(6, 5), **others):
    """The arrays of a small file with so many images a class."""
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        arrays[f"{part}_images"] = RNG.integers(0, 256, (kinds * count, *shape), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(kinds * count) % kinds
    arrays |= others
    return {key: array for key, array in arrays.items() if array is not None}


@pytest.fixture
def make(tmp_path):
    def save(name="data.npz", **arguments):
        np.savez(tmp_path / name, **content(**arguments))
        return tmp_path / name

    return save


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_are_read_alone_and_together(dtype):
    pixels = RNG.integers(0, 256, (7, 3, 6, 5)).astype(dtype)
    images = ArrayImages(pixels, np.arange(7), "some/train")
    assert (len(images), images.name(4), images.labels.dtype) == (7, "some/train/4", np.int64)
    np.testing.assert_array_equal(images.read(4), pixels[4])
    order = np.array([5, 0, 5])
    together = images.read_many(order)
    assert together.dtype == dtype
    np.testing.assert_array_equal(together, np.stack([images.read(i) for i in order]))
    crop = Crop(area=0.3, aspect=0.5, top=0.2, left=0.9)
    np.testing.assert_array_equal(images.read(2, crop), crop_and_resize(pixels[2], (6, 5), crop))
    assert images.read(2, crop).shape == (3, 6, 5)


def test_what_is_read_belongs_to_the_reader():
    images = ArrayImages(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, int), "some")
    images.read(0)[:] = 1
    images.read_many(np.array([0, 1]))[:] = 1
    assert not images.images.any()


def test_memory_of_a_file_can_be_cropped():
    """Without a warning of torch on memory that must not be written to."""
    images = ArrayImages(np.frombuffer(bytes(range(32)), np.uint8).reshape(2, 1, 4, 4), np.zeros(2, int), "some")
    rows = Crop(area=0.75, aspect=1.0, top=0.5, left=0.5)
    assert rows.box(4, 4)[2:] == (3, 4)  # whole rows, which need no copy
    assert images.read(1, rows).shape == (1, 4, 4)


def test_subset_keeps_names():
    images = ArrayImages(RNG.integers(0, 256, (7, 1, 4, 4), dtype=np.uint8), np.arange(7), "some/train")
    part = images.subset(np.array([6, 2])).subset(np.array([1]))
    assert (len(part), part.name(0), part.labels.tolist()) == (1, "some/train/2", [2])
    np.testing.assert_array_equal(part.read(0), images.read(2))


def test_shapes_must_fit():
    with pytest.raises(DataError, match=r"some: images are \[N, C, H, W\] of uint8 or float32, got \[2, 4, 4\] of uint8"):
        ArrayImages(np.zeros((2, 4, 4), np.uint8), np.zeros(2), "some")
    with pytest.raises(DataError, match="of float64"):
        ArrayImages(np.zeros((2, 1, 4, 4)), np.zeros(2), "some")
    with pytest.raises(DataError, match=r"2 images need as many labels, got shape \[3\]"):
        ArrayImages(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(3), "some")


def test_read_grey_and_colour(tmp_path):
    for shape in ((6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 13)):
        arrays = content(shape=shape)
        np.savez_compressed(tmp_path / "a.npz", **arrays, unknown=np.arange(3))
        file = read_npz(tmp_path / "a.npz")
        channels = shape[2] if len(shape) == 3 else 1
        assert (file.shape, file.num_classes, file.classes, sorted(file.parts)) == (
            (channels, 6, 5),
            3,
            None,
            ["test", "train"],
        )
        images, labels = file.parts["train"]
        np.testing.assert_array_equal(labels, arrays["train_labels"])
        last = arrays["train_images"].reshape(24, 6, 5, channels)
        for channel in range(channels):
            np.testing.assert_array_equal(images[:, channel], last[..., channel])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_images": None}, ["has no train_images", "test_labels"]),
        ({"test_labels": None}, ["has no test_labels"]),
        ({"val_images": np.zeros((3, 6, 5), np.uint8)}, ["has no val_labels"]),
        ({"val_labels": np.zeros(3, int)}, ["has no val_images"]),
        ({"train_images": np.zeros((24, 30), np.uint8)}, ["train_images must be uint8 [N, H, W]", "[24, 30] of uint8"]),
        ({"train_images": np.zeros((24, 6, 5), np.float32)}, ["train_images must be uint8", "of float32"]),
        ({"train_images": np.zeros((0, 6, 5), np.uint8)}, ["at least one image", "[0, 6, 5]"]),
        ({"train_images": np.zeros((24, 6, 0), np.uint8)}, ["at least one image"]),
        ({"train_images": np.zeros((24, 3, 16, 16), np.uint8)}, ["look channel-first", "transpose(0, 2, 3, 1)"]),
        ({"test_images": np.zeros((6, 5, 6), np.uint8)}, ["test_images are [6, 5, 6] of uint8", "resize"]),
        ({"train_labels": np.zeros(23, int)}, ["train_images has 24 images but train_labels 23 labels"]),
        ({"train_labels": np.zeros(24)}, ["train_labels must be whole numbers [N]", "of float64"]),
        ({"train_labels": np.zeros((24, 1), int)}, ["train_labels must be whole numbers [N]", "[24, 1]"]),
        ({"train_labels": np.full(24, -1)}, ["train_labels must count classes from 0", "-1 to -1"]),
        ({"test_labels": np.full(6, 2**62)}, ["test_labels must count classes from 0"]),
        ({"train_labels": np.array([None] * 24)}, ["train_labels holds Python objects"]),
        ({"classes": np.arange(3)}, ["classes must be a list of names", "of int64"]),
        ({"classes": np.array([["a", "b", "c"]])}, ["classes must be a list of names", "[1, 3]"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said(make, refused, change, words):
    path = make(**change)
    with refused(path, *words):
        read_npz(path)


def test_pixel_limit(make, refused, monkeypatch):
    monkeypatch.setattr("revit.data.arrays.MAX_PIXELS", 29)
    with refused("data.npz", "6 x 5 pixels"):
        read_npz(make())


def open_arrays(path, **options):
    return open_dataset(DataOptions("arrays", root=str(path.parent), **options))


def test_the_only_file_is_opened(make):
    path = make(train=10)
    dataset = open_arrays(path)
    assert dataset.spec.classes == ("0", "1", "2") and dataset.spec.size == (6, 5) and dataset.spec.channels == 1
    assert dataset.spec.source == "data.npz: 27 train, 3 validation and 6 test images"
    arrays = np.load(path)
    for images, labels in ((dataset.train, [9, 9, 9]), (dataset.val, [1, 1, 1]), (dataset.test, [2, 2, 2])):
        assert np.bincount(images.labels).tolist() == labels
    for images in (dataset.train, dataset.val, dataset.test):
        for i in range(len(images)):
            name, part, number = images.name(i).split("/")
            assert (name, part) == ("data", "test" if images is dataset.test else "train")
            np.testing.assert_array_equal(images.read(i)[0], arrays[f"{part}_images"][int(number)])
            assert images.labels[i] == arrays[f"{part}_labels"][int(number)]
    names = [images.name(i) for images in (dataset.train, dataset.val) for i in range(len(images))]
    assert len(set(names)) == 30


def test_split_follows_its_options(make):
    path = make(train=10)
    first, second, third = (
        [d.val.name(i) for i in range(len(d.val))]
        for d in (open_arrays(path), open_arrays(path, split_seed=1), open_arrays(path, val_fraction=0.3))
    )
    assert first != second and len(third) == 9


def test_validation_part_of_the_file(make):
    val = {"val_images": RNG.integers(0, 256, (4, 6, 5), dtype=np.uint8), "val_labels": np.array([0, 1, 2, 0])}
    dataset = open_arrays(make(**val))
    assert (len(dataset.train), len(dataset.val), dataset.val.name(3)) == (24, 4, "data/val/3")
    np.testing.assert_array_equal(dataset.val.read(3)[0], val["val_images"][3])


def test_class_names(make, refused):
    assert open_arrays(make(kinds=4)).spec.classes == ("0", "1", "2", "3")
    arrays = content()
    for names, words in ((["a", "b"], ["label 2", "2 classes"]), (["a", "b", "c", "d"], ["no image of class 3"])):
        path = make()
        np.savez(path, **arrays, classes=np.array(names))
        with refused("data.npz", *words):
            open_arrays(path)
    np.savez(path, **arrays, classes=np.array(["cat", "dog", "emu"]))
    assert open_arrays(path).spec.classes == ("cat", "dog", "emu")


def test_labels_without_gaps(make, refused):
    with refused("data.npz", "train_labels has no image of class 1", "without gaps"):
        open_arrays(make(train_labels=np.arange(24) % 2 * 2))
    with refused("data.npz", "train_labels has no image of class 0"):
        open_arrays(make(train_labels=np.full(24, 2**30)))
    with refused("data.npz", "train_labels has no image of class 3"):
        open_arrays(make(test_labels=np.full(6, 3)))


def test_single_images_cannot_be_held_out(make, refused):
    with refused("data/train", "no class has two images", "val_images"):
        open_arrays(make(train=1))
    lonely = ArrayImages(np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 0, 1]), "some")
    train, val = hold_out(lonely, DataOptions("arrays"))
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1], [0])


def test_which_file(make, tmp_path, refused):
    with refused("holds 0 .npz files (none)", "--data.file"):
        open_dataset(DataOptions("arrays", root=str(tmp_path)))
    one, two = make("one.npz"), make("two.npz", shape=(4, 4))
    with refused(tmp_path, "holds 2 .npz files (one.npz, two.npz)"):
        open_arrays(one)
    assert open_arrays(one, file="two.npz").spec.size == (4, 4)
    assert open_dataset(DataOptions("arrays", file=str(two))).spec.size == (4, 4)
    with refused(tmp_path / "three.npz", "no such file"):
        open_arrays(one, file="three.npz")
    with refused("--data-root"):
        open_dataset(DataOptions("arrays"))


def test_statistics_of_the_training_images(make, cache, monkeypatch):
    path = make(shape=(6, 5, 3), train=200)
    dataset = open_arrays(path)
    pixels = dataset.train.images / 255
    np.testing.assert_allclose(dataset.spec.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(dataset.spec.std, pixels.std(axis=(0, 2, 3)), rtol=1e-9)

    def never(images):
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr("revit.data.arrays.channel_statistics", never)
        assert open_arrays(path).spec == dataset.spec
        for kept in cache.iterdir():
            kept.write_text('{"mean": 1}')
        with pytest.raises(AssertionError, match="computed again"):
            open_arrays(path)
    assert open_arrays(path).spec == dataset.spec
    make(shape=(6, 5, 3), train=201)
    assert open_arrays(path).spec.mean != dataset.spec.mean
