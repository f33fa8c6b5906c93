"""A sample of ImageNet in one file: groups of classes, three splits, damage named; and fingerprints of datasets."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from revit.data import DataError, DataOptions, open_dataset
from revit.data.identity import dataset_fingerprint
from revit.data.photos import FILE


def write(folder, given, **changes):
    """One JPEG of its own grey for each label that is given."""
    files = []
    for i in range(len(given)):
        file = io.BytesIO()
        Image.new("RGB", (20, 20), (i, i, i)).save(file, "JPEG", quality=95)
        files.append(file.getvalue())
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.asarray(given, dtype=np.int16),
    }
    np.savez(folder / FILE, **{**arrays, **changes})
    return DataOptions(name="photos", root=str(folder), size=16)


LABELS = [group * 100 + i for group in (0, 3, 9) for i in range(10)]


def test_neighbouring_classes_are_one_group_and_splits_are_apart(tmp_path):
    dataset = open_dataset(write(tmp_path, LABELS))
    assert dataset.spec.classes == ("classes 0 to 99", "classes 300 to 399", "classes 900 to 999")
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [21, 3, 6]
    greys = {part: {round(float(s.read(i).mean())) for i in range(len(s))} for part, s in
             ((part, dataset.split(part)) for part in ("train", "val", "test"))}  # fmt: skip
    assert sum(map(len, greys.values())) == 30 and len(set.union(*greys.values())) == 30  # every photo once, in one split
    for part in ("train", "val", "test"):
        split = dataset.split(part)
        for i in range(len(split)):
            assert split.labels[i] == round(float(split.read(i).mean())) // 10  # ten photos of a group come one after another
        assert split.read(0).shape == (3, 16, 16) and "image" in split.name(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros(4, dtype=np.int16)}, "labels must be 30 whole numbers from 0"),
        ({"labels": np.full(30, -1)}, "labels must be 30 whole numbers from 0"),
        ({"labels": np.arange(30)}, "all labels fall into one group of 100"),
    ],
)
def test_wrong_labels_are_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=re.escape(message)):
        open_dataset(write(tmp_path, LABELS, **changes))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{FILE}: not there; name the folder"):
        open_dataset(DataOptions(name="photos", root=str(tmp_path)))


def test_fingerprints_tell_datasets_apart(tmp_path):
    dataset = open_dataset(write(tmp_path, LABELS))
    same = dataset_fingerprint(open_dataset(DataOptions(name="photos", root=str(tmp_path), size=16)))
    assert dataset_fingerprint(dataset) == same and len(same) == 16
    others = [
        open_dataset(DataOptions(name="photos", root=str(tmp_path), size=16, split_seed=1)),
        open_dataset(DataOptions(name="photos", root=str(tmp_path), size=12)),
        replace(dataset, test=dataset.val),
        replace(dataset, spec=replace(dataset.spec, source="elsewhere")),
    ]
    assert len({same, *map(dataset_fingerprint, others)}) == 5
