"""The folder dataset: layouts, splits, bad files, and what is said when something is wrong."""

import os
import pickle

import numpy as np
import pytest
from PIL import Image

from revit.data import folder as folder_module
from revit.data import listing as listing_module
from revit.data.file_images import FileImages, KeptImages
from revit.data.listing import natural
from revit.data.registry import open_dataset
from revit.data.spec import BadImage, Crop, DataError, DataOptions


def write(path, value=0, size=(6, 6)):
    """A grey PNG whose pixels all have one value, so that it can be known again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size, value % 256, dtype=np.uint8)).save(path)
    return path


def classes(root, names=("cat", "dog"), count=10, **options):
    for c, name in enumerate(names):
        for i in range(count):
            write(root / name / f"{i}.png", 100 * c + i, **options)
    return root


def open_folder(root, **options):
    return open_dataset(DataOptions(name="folder", root=str(root), **options))


def fails(root, match, **options):
    with pytest.raises(DataError, match=match) as caught:
        open_folder(root, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def names(images):
    return {"/".join(images.name(i).split("/")[-2:]) for i in range(len(images))}


def test_class_folders_are_split_by_seed(tmp_path):
    data = open_folder(classes(tmp_path), val_fraction=0.25)
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [12, 4, 4]
    parts = [names(data.split(part)) for part in ("train", "val", "test")]
    assert len(set.union(*parts)) == 20
    assert all(
        np.bincount(data.split(part).labels).tolist() == [len(data.split(part)) // 2] * 2 for part in ("train", "val", "test")
    )
    assert data.spec.classes == ("cat", "dog") and data.spec.size == (6, 6) and data.spec.channels == 1
    assert "test: 0.2 of all images, class by class, seed 0; validation: 0.25 of the training images" in data.spec.source
    again, other = open_folder(tmp_path, val_fraction=0.25), open_folder(tmp_path, val_fraction=0.25, split_seed=1)
    assert [names(again.split(p)) for p in ("train", "val", "test")] == parts
    assert [names(other.split(p)) for p in ("train", "val", "test")] != parts


def test_pixels_labels_and_names_belong_together(tmp_path):
    for memory in (2.0, 0.0):
        data = open_folder(classes(tmp_path), memory_gb=memory)
        assert isinstance(data.train, KeptImages if memory else FileImages)
        for part in (data.train, data.val, data.test):
            for i in range(len(part)):
                image = part.read(i)
                folder, name = part.name(i).split("/")[-2:]
                assert image.shape == (1, 6, 6) and image.dtype == np.uint8
                assert data.spec.classes[part.labels[i]] == folder
                assert (image == 100 * (folder == "dog") + int(name[0])).all()


def test_kept_images_are_those_of_the_files(tmp_path):
    random = np.random.default_rng(0)
    for i in range(20):
        path = tmp_path / ("a" if i % 2 else "b") / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(path)
    kept, lazy = open_folder(tmp_path), open_folder(tmp_path, memory_gb=0)
    assert kept.spec == lazy.spec
    crop = Crop(area=0.4, aspect=0.7, top=0.5, left=0.1)
    for i in range(len(kept.train)):
        np.testing.assert_array_equal(kept.train.read(i), lazy.train.read(i))
        np.testing.assert_array_equal(kept.train.read(i, crop), lazy.train.read(i, crop))
    indices = np.array([3, 0, 3])
    np.testing.assert_array_equal(kept.train.read_many(indices), np.stack([lazy.train.read(i) for i in indices]))
    before = kept.train.read(0).copy()
    kept.train.read(0)[:] = 0
    np.testing.assert_array_equal(kept.train.read(0), before)
    assert pickle.loads(pickle.dumps(lazy.train)).name(1) == lazy.train.name(1)  # for workers


def test_images_that_are_resized_are_not_kept(tmp_path):
    """A crop of a resized image is not a resized crop."""
    data = open_folder(classes(tmp_path, size=(12, 12)), size=6)
    assert isinstance(data.train, FileImages) and data.train.read(0).shape == (1, 6, 6) and data.spec.size == (6, 6)
    write(tmp_path / "cat" / "other.png", size=(13, 12))
    assert isinstance(open_folder(tmp_path).train, FileImages)


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_given_parts_are_kept(tmp_path, val):
    for part, count in (("train", 5), (val, 3), ("test", 2)):
        classes(tmp_path / part, count=count)
    data = open_folder(tmp_path)
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [10, 6, 4]
    assert {name.split("/")[-3] for name in map(data.val.name, range(6))} == {val}
    assert "seed" not in data.spec.source


def test_missing_parts_come_from_train(tmp_path):
    for part in ("train", "val"):
        classes(tmp_path / "a" / part)
    data = open_folder(tmp_path / "a")
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [16, 20, 4]
    assert data.spec.source == "folder a; test: 0.2 of the training images, class by class, seed 0"
    for part in ("train", "test"):
        classes(tmp_path / "b" / part)
    data = open_folder(tmp_path / "b")
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [18, 2, 20]
    assert data.spec.source == "folder b; validation: 0.1 of the training images, class by class, seed 0"


def test_class_order_is_natural_and_folders_are_searched(tmp_path):
    classes(tmp_path, names=("c10", "c2", "C2", "c1"), count=2)
    write(tmp_path / "c1" / "deep" / "er" / "x.png")
    (tmp_path / "c1" / ".hidden").mkdir()
    write(tmp_path / "c1" / ".hidden" / "y.png")
    write(tmp_path / "c1" / ".z.png")
    (tmp_path / "c1" / "notes.txt").touch()
    (tmp_path / "README.md").touch()
    data = open_folder(tmp_path)
    assert data.spec.classes == ("c1", "C2", "c2", "c10")
    found = set.union(*(names(data.split(part)) for part in ("train", "val", "test")))
    assert len(found) == 9 and "er/x.png" in found


def test_natural_order():
    long = "9" * 5000  # more digits than Python reads as a number
    assert sorted([long, "8"], key=natural) == ["8", long]
    assert sorted(["b1", "a", "a10", "a9", "A10", "1", "٣", ""], key=natural) == ["", "1", "٣", "a", "a9", "A10", "a10", "b1"]


def test_classes_called_train_and_test(tmp_path):
    classes(tmp_path, names=("train", "bus", "test"))
    assert open_folder(tmp_path).spec.classes == ("bus", "test", "train")
    classes(tmp_path / "train", names=("steam", "electric"))
    assert open_folder(tmp_path).spec.classes == ("bus", "test", "train")


def test_grey_and_colour_become_colour(tmp_path):
    classes(tmp_path, count=5)
    Image.new("RGB", (6, 6), (1, 2, 3)).save(tmp_path / "cat" / "colour.png")
    for memory in (0.0, 2.0):
        data = open_folder(tmp_path, memory_gb=memory)
        assert data.spec.channels == 3 and len(data.spec.mean) == 3
        assert all(data.train.read(i).shape == (3, 6, 6) for i in range(len(data.train)))


def test_eight_and_sixteen_bits_become_floats(tmp_path):
    classes(tmp_path, count=5)
    Image.fromarray(np.full((6, 6), 65535, dtype=np.uint16)).save(tmp_path / "cat" / "deep.png")
    for memory in (0.0, 2.0):
        data = open_folder(tmp_path, memory_gb=memory)
        images = [part.read(i) for part in (data.train, data.val, data.test) for i in range(len(part))]
        assert {image.dtype for image in images} == {np.dtype(np.float32)}
        assert sorted(round(float(image[0, 0, 0]) * 255) for image in images) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104, 255]


def test_other_channels_are_bad(tmp_path):
    classes(tmp_path, count=5)
    np.save(tmp_path / "cat" / "five.npy", np.zeros((6, 6, 5), dtype=np.uint8))
    fails(tmp_path, "five.npy: 5 channels among images of 1")
    data = open_folder(tmp_path, on_bad="skip", max_bad=0.1)
    assert [name.split("/")[-1] for name, _ in data.skipped] == ["five.npy"]


def spoil(root, *files):
    for file in files:
        (root / file).write_bytes(b"")


def test_bad_images_stop(tmp_path):
    spoil(classes(tmp_path), "cat/3.png", "dog/4.png")
    error = fails(tmp_path, r"cat/3.png: empty, .*2 of 20 images cannot be read; --on-bad skip")
    assert isinstance(error, BadImage)


def test_bad_images_are_skipped_and_reported(tmp_path):
    spoil(classes(tmp_path), "cat/3.png", "dog/4.png")
    for memory in (0.0, 2.0):
        data = open_folder(tmp_path, on_bad="skip", max_bad=0.1, memory_gb=memory)
        assert [(name.split("/")[-1], reason[:5]) for name, reason in data.skipped] == [("3.png", "empty"), ("4.png", "empty")]
        assert sum(len(data.split(part)) for part in ("train", "val", "test")) == 18
        assert "2 bad files left out" in data.spec.source
        assert not {"cat/3.png", "dog/4.png"} & set.union(*(names(data.split(part)) for part in ("train", "val", "test")))


def test_more_than_one_percent_is_too_many(tmp_path):
    classes(tmp_path, count=100)
    spoil(tmp_path, "cat/3.png", "dog/4.png")
    assert len(open_folder(tmp_path, on_bad="skip").skipped) == 2
    spoil(tmp_path, "dog/7.png")
    fails(tmp_path, "3 of 200 images cannot be read, more than the 0.01 of them .*cat/3.png: empty", on_bad="skip")


def test_half_bad(tmp_path):
    classes(tmp_path, count=3)
    spoil(tmp_path, "cat/0.png", "dog/0.png", "dog/1.png", "dog/2.png")
    fails(tmp_path, "4 of 6 images cannot be read, more than the 0.5 .*cat/0.png: empty", on_bad="skip", max_bad=0.5)
    spoil(tmp_path, "cat/1.png", "cat/2.png")
    fails(tmp_path, "none of the 6 images can be read; the first: .*cat/0.png", on_bad="skip")


def test_parts_that_bad_images_leave_empty(tmp_path):
    for part in ("train", "val", "test"):
        classes(tmp_path / part, count=3)
    spoil(tmp_path, *(f"train/dog/{i}.png" for i in range(3)))
    fails(tmp_path, "class dog has no training image left", on_bad="skip", max_bad=0.5)
    classes(tmp_path / "train", count=9)
    spoil(tmp_path, *(f"val/{name}/{i}.png" for i in range(3) for name in ("cat", "dog")))
    fails(tmp_path, "no validation image is left", on_bad="skip", max_bad=0.5)


def test_bad_images_that_the_scan_has_not_seen(tmp_path, monkeypatch):
    """Of more images than are decoded beforehand, the loader or the memory meets the rest first."""
    classes(tmp_path)
    (tmp_path / "cat" / "3.png").write_bytes((tmp_path / "cat" / "3.png").read_bytes()[:45])
    monkeypatch.setattr("revit.data.scan.MAX_DECODED", 5)
    monkeypatch.setattr("revit.data.scan._sample", lambda count: np.arange(10, 15))
    fails(tmp_path, "cat/3.png: damaged")
    fails(tmp_path, "1 of 20 images cannot be read, more than the 0.01", on_bad="skip")
    data = open_folder(tmp_path, on_bad="skip", max_bad=0.05)
    assert len(data.skipped) == 1 and sum(len(data.split(part)) for part in ("train", "val", "test")) == 19
    lazy = open_folder(tmp_path, memory_gb=0)
    with pytest.raises(BadImage, match="cat/3.png: damaged"):
        for part in (lazy.train, lazy.val, lazy.test):
            for i in range(len(part)):
                part.read(i)


def test_folders_without_classes(tmp_path):
    fails(tmp_path / "none", "no such folder")
    fails(tmp_path, "holds no images; give each class a folder .*CSV")
    write(tmp_path / "1.png")
    fails(tmp_path, "holds images, but no folders of classes; give each class a folder .*CSV")
    classes(tmp_path, names=("cat",))
    fails(tmp_path, "one class only, cat")
    (tmp_path / "dog").mkdir()
    fails(tmp_path, r"dog: a class without images \(no files\)")
    (tmp_path / "dog" / "notes.txt").touch()
    fails(tmp_path, r"dog: a class without images \(1 files, but no image by its name\)")
    with pytest.raises(DataError, match="REVIT_DATA"):
        folder_module.folder(DataOptions(name="folder"))


def test_parts_without_classes(tmp_path):
    write(tmp_path / "train" / "1.png")
    write(tmp_path / "test" / "2.png")
    fails(tmp_path, "train/ has no folders of classes; give each class a folder")
    classes(tmp_path / "x" / "test")
    classes(tmp_path / "x" / "val")
    fails(tmp_path / "x", "has test, val but no train")
    classes(tmp_path / "y" / "train")
    classes(tmp_path / "y" / "val")
    classes(tmp_path / "y" / "valid")
    fails(tmp_path / "y", "val, valid would be the same part")


def test_parts_with_other_classes(tmp_path):
    classes(tmp_path / "train", names=("cat", "dog", "owl"))
    classes(tmp_path / "test", names=("cat", "dog", "elk"))
    fails(tmp_path, "test: its classes are not those of train: it lacks owl and has elk besides")


def test_too_few_images_to_split(tmp_path):
    fails(classes(tmp_path, count=1), "no class has the two images .* test part")


def test_links(tmp_path):
    """Links to images and to class folders count; links to folders below them do not, or they would lead in circles."""
    root = classes(tmp_path / "root")
    classes(tmp_path / "elsewhere", names=("owl",))
    (root / "owl").symlink_to(tmp_path / "elsewhere" / "owl")
    (root / "cat" / "again").symlink_to(root / "cat")
    (root / "cat" / "dogs").symlink_to(root / "dog")
    (root / "cat" / "self").symlink_to("self")
    (root / "cat" / "one.png").symlink_to(tmp_path / "elsewhere" / "owl" / "1.png")
    data = open_folder(root)
    assert data.spec.classes == ("cat", "dog", "owl") and sum(len(data.split(p)) for p in ("train", "val", "test")) == 31
    (root / "everything").symlink_to(root)
    fails(root, "everything: a link back to the folder that holds it")


def test_broken_link_is_a_bad_image(tmp_path):
    (classes(tmp_path) / "cat" / "gone.png").symlink_to("nowhere.png")
    fails(tmp_path, "gone.png: a link to nowhere.png, which does not exist")


def test_names_that_are_not_utf8(tmp_path):
    root = classes(tmp_path)
    os.rename(root / "dog", os.path.join(os.fsencode(root), b"d\xf6g"))
    os.rename(root / "cat" / "1.png", os.path.join(os.fsencode(root), b"cat", b"\xe9.png"))
    for _ in range(2):  # from the scan and from the cache
        data = open_folder(root)
        assert data.spec.classes == ("cat", "d\\xf6g")
        found = set.union(*(names(data.split(part)) for part in ("train", "val", "test")))
        assert len(found) == 20 and "cat/\\xe9.png" in found
        "".join(found).encode()
    spoil(root, os.path.join("cat", os.fsdecode(b"\xe9.png")))
    str(fails(root, r"cat/\\xe9.png: empty")).encode()


def test_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    classes(tmp_path)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(listing_module.os, "scandir", scandir)  # root may list everything
    fails(tmp_path, r"dog: cannot be listed \(Permission denied\); try chmod")
