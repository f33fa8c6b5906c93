"""ImageNet's layout in miniature."""

import os
import pickle

import numpy as np
import pytest
from PIL import Image

from revit.data import imagenet as module
from revit.data.registry import open_dataset
from revit.data.spec import BadImage, Crop, DataError, DataOptions

WNIDS = ("n01440764", "n01443537", "n02105855")


@pytest.fixture
def root(tmp_path):
    for part, count in (("train", 7), ("val", 2)):
        for c, wnid in enumerate(WNIDS):
            folder = tmp_path / part / wnid
            folder.mkdir(parents=True)
            for i in range(count):
                image = Image.new("L" if i == 0 else "RGB", (40, 32), 80 * c + i if i == 0 else (80 * c + i,) * 3)
                image.save(folder / f"{wnid}_{i}.JPEG", quality=95)
    return tmp_path


def open_imagenet(root, **options):
    return open_dataset(DataOptions(name="imagenet", root=str(root), **options))


def test_splits_and_description(root):
    data = open_imagenet(root)
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [18, 3, 6]
    assert data.spec.size == (224, 224) and data.spec.classes == WNIDS and data.spec.mean == (0.485, 0.456, 0.406)
    assert data.spec.source == (
        "3 class folders; test: the official validation images (6);"
        " validation: 3 of the training images, class by class, seed 0"
    )
    paths = [{part.name(i) for i in range(len(part))} for part in (data.train, data.val, data.test)]
    assert len(set.union(*paths)) == 27
    assert all("/train/" in path for path in paths[0] | paths[1]) and all("/val/" in path for path in paths[2])
    assert {part.name(0) for part in (open_imagenet(root, split_seed=s).val for s in range(8))} != {data.val.name(0)}


def test_selection_gets_at_most_one_in_a_hundred(root, monkeypatch):
    fractions = []

    def split(labels, fraction, seed):
        fractions.append(fraction)
        return np.arange(3, len(labels)), np.arange(3)

    monkeypatch.setattr(module, "stratified_split", split)
    open_imagenet(root)
    open_imagenet(root, val_fraction=0.005)
    monkeypatch.setattr(module, "VAL_IMAGES", 0.021)
    open_imagenet(root)
    assert fractions == [0.01, 0.005, 0.001]


def test_images_are_read_when_asked_for(root):
    data = open_imagenet(root, size=16)
    for part in (data.train, data.val, data.test):
        for i in range(len(part)):
            image = part.read(i)
            wnid, number = os.path.splitext(os.path.basename(part.name(i)))[0].split("_")
            assert image.shape == (3, 16, 16) and image.dtype == np.uint8
            assert data.spec.classes[part.labels[i]] == wnid
            assert np.abs(image.astype(int) - (80 * WNIDS.index(wnid) + int(number))).max() <= 3
    assert data.train.read(0, Crop(0.5, 0.5, 0.5, 0.5)).shape == (3, 16, 16)
    (root / "val" / WNIDS[0] / f"{WNIDS[0]}_1.JPEG").write_bytes(b"")
    with pytest.raises(BadImage, match="n01440764_1.JPEG: empty"):
        open_imagenet(root).test.read(1)


def test_evaluation_sees_the_centre_and_crops_see_all(root):
    frame = np.full((64, 80, 3), 255, dtype=np.uint8)
    frame[4:60, 12:68] = 0
    Image.fromarray(frame).save(root / "val" / WNIDS[0] / f"{WNIDS[0]}_0.JPEG", format="PNG")
    data = open_imagenet(root, size=56)
    assert data.test.read(0).max() == 0
    assert data.test.read(0, Crop(1, 0.5, 0, 0, scale=(1, 1), ratio=(1.25, 1.25))).max() == 255


def test_folder_below_the_root_and_odd_files(root, tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    (above / "imagenet").symlink_to(root)
    (root / "train" / "notes.txt").touch()
    (root / "train" / WNIDS[1] / ".hidden.JPEG").touch()
    (root / "train" / WNIDS[1] / "list.txt").touch()
    assert len(open_imagenet(above).train) == 18


def test_layouts_that_do_not_work(root, tmp_path_factory):
    def fails(match):
        with pytest.raises(DataError, match=match):
            open_imagenet(root)

    with pytest.raises(DataError, match="no folder train in it or in imagenet below it"):
        open_imagenet(tmp_path_factory.mktemp("empty"))
    os.rename(root / "val" / WNIDS[2], root / "val" / "n09")
    fails("2 classes are in train or val alone, such as n02105855")
    os.rename(root / "val" / "n09", root / "val" / WNIDS[2])
    (root / "train" / "n10").mkdir()
    (root / "val" / "n10").mkdir()
    fails("train/n10: a class without images")
    os.rename(root / "val", root / "old")
    fails("has train but no val; the official archive")
    (root / "val").mkdir()
    (root / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    fails(r"val: no class folders; .*sort them into val/<wnid>/ .*valprep.sh")
    os.rename(root / "train", root / "other")
    (root / "train" / "one").mkdir(parents=True)
    fails("train: 1 class folders, at least 2 are needed")


def test_path_table(root):
    (root / "train" / WNIDS[0] / os.fsdecode(b"caf\xe9.JPEG")).touch()
    table, labels = module._list_images(root / "train", list(WNIDS))
    expected = [str(path) for wnid in WNIDS for path in sorted((root / "train" / wnid).iterdir(), key=os.fsencode)]
    assert list(table) == expected and len(labels) == len(expected) == 22
    assert table[-1] == expected[-1] and list(table[3:9:2]) == expected[3:9:2]
    assert list(table.take(np.array([5, 0]))) == [expected[5], expected[0]]
    assert list(pickle.loads(pickle.dumps(table))) == expected
    with pytest.raises(IndexError):
        table[22]
