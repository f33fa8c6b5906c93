"""Sharded archives as a dataset: the same images as the files, few archives at a time, and clear refusals."""

import json
import multiprocessing
import pickle
import tarfile

import numpy as np
import pytest
import torch

from revit.data import BadImage, DataOptions, open_dataset
from revit.data import shards as module
from revit.data.augment import AugmentOptions, partners
from revit.data.image_files import ImageBytes, read_image
from revit.data.loader import EvalLoader, Reading, Share, TrainLoader, blocks_of, epoch_batches
from revit.data.packing import pack_dataset
from revit.data.randomness import WINDOW
from tests.cli.conftest import png_folder
from tests.data.tars import png, samples, write_shards, write_tar

CPU = torch.device("cpu")


def opened(root, **options):
    return open_dataset(DataOptions(name="shards", root=str(root), **options))


def test_images_and_labels_are_those_of_the_archives(tmp_path):
    write_tar(tmp_path / "train-0.tar", samples(0, 4))
    write_tar(tmp_path / "train-1.tar", samples(4, 6))
    write_tar(tmp_path / "validation.tar", samples(20, 4))
    write_tar(tmp_path / "test" / "00.tar", samples(40, 2))
    dataset = opened(tmp_path)
    assert dataset.spec.classes == ("cat", "dog") and dataset.spec.size == (8, 8) and dataset.spec.name == "shards"
    for split, first in (("train", 0), ("val", 20), ("test", 40)):
        images = dataset.split(split)
        assert np.array_equal(images.labels, np.arange(len(images)) % 2)
        for i in range(len(images)):
            assert np.array_equal(images.read(i), read_image(ImageBytes(png(first + i), "x")))
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [10, 4, 2]
    assert dataset.train.name(5) == f"{tmp_path}/train-1.tar/0005.png"
    assert dataset.train.blocks.tolist() == [0, 4, 10]
    pixels = np.stack([dataset.train.read(i) for i in range(10)]) / 255
    assert np.allclose(dataset.spec.mean, pixels.mean((0, 2, 3))) and np.allclose(dataset.spec.std, pixels.std((0, 2, 3)))


def test_parts_that_are_missing_are_split_off_class_by_class(tmp_path):
    write_shards(tmp_path, archives=4, each=10)
    dataset = opened(tmp_path)
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [28, 4, 8]
    names = [dataset.split(part).name(i) for part in ("train", "val", "test") for i in range(len(dataset.split(part)))]
    assert len(set(names)) == 40
    assert np.bincount(dataset.test.labels).tolist() == [4, 4] and np.bincount(dataset.val.labels).tolist() == [2, 2]
    assert "test: 0.2 of the training images" in dataset.spec.source
    other = opened(tmp_path, split_seed=1)
    assert {other.test.name(i) for i in range(8)} != {dataset.test.name(i) for i in range(8)}


def test_an_epoch_is_a_permutation_that_touches_few_archives_at_a_time(tmp_path):
    write_shards(tmp_path, archives=30, each=7)
    images = opened(tmp_path, test_fraction=0.1, val_fraction=0.1).train
    archive = images.sources.archive[images.numbers]
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        batches = epoch_batches(images, 16, seed, epoch, "order")
        order = orders[seed, epoch] = np.concatenate(batches)
        assert sorted(order) == list(range(len(images)))
        assert max(len(set(archive[batch])) for batch in batches) <= 2 * WINDOW
        visits = [archive[order] == k for k in range(30)]
        spans = np.array([(np.flatnonzero(visit)[0], np.flatnonzero(visit)[-1]) for visit in visits])
        alive = [int(((spans[:, 0] <= i) & (i <= spans[:, 1])).sum()) for i in range(len(order))]
        assert max(alive) <= WINDOW  # an archive is left for good before one of the next window is begun
    assert not np.array_equal(orders[0, 0], orders[0, 1]) and not np.array_equal(orders[0, 0], orders[1, 0])
    assert np.array_equal(orders[0, 1], np.concatenate(epoch_batches(images, 16, 0, 1, "order")))
    found = partners(np.arange(len(images)), blocks_of(images), 0, 0)
    assert np.array_equal(archive[found], archive) and not np.any(found == np.arange(len(images)))


def test_few_files_are_open_and_they_stay_in_their_process(tmp_path):
    write_shards(tmp_path, archives=3 * WINDOW, each=3)
    images = opened(tmp_path).train
    for i in range(len(images)):
        images.read(i)
        assert len(images.files.handles) <= 2 * WINDOW
    assert len(images.files.handles) == 2 * WINDOW
    copy = pickle.loads(pickle.dumps(images))
    assert copy.files.handles == {} and np.array_equal(copy.read(3), images.read(3))


def epoch_of(images, spec, start=0, **options):
    loader = TrainLoader(
        images, spec, batch_size=12, seed=3, augment=AugmentOptions(rotate=180, mixup=0.4, crop_scale=0.5), **options
    )
    return [(b.samples, *loader.prepare(b, 1, CPU, torch.float32)) for step in loader.batches(1, start) for b in step]


def test_workers_steps_and_processes_do_not_matter(tmp_path):
    write_shards(tmp_path, archives=12, each=6)
    dataset = opened(tmp_path)
    whole = epoch_of(dataset.train, dataset.spec)
    for other in (
        epoch_of(dataset.train, dataset.spec, reading=Reading(workers=2)),
        [*whole[:2], *epoch_of(opened(tmp_path).train, dataset.spec, start=2)],
    ):
        for (samples1, x1, y1), (samples2, x2, y2) in zip(whole, other, strict=True):
            assert np.array_equal(samples1, samples2) and torch.equal(x1, x2) and torch.equal(y1, y2)
    halves = [epoch_of(dataset.train, dataset.spec, reading=Reading(Share(rank, 2))) for rank in (0, 1)]
    for (_, x, _), (_, first, _), (_, second, _) in zip(whole, *halves, strict=True):
        assert torch.allclose(x, torch.cat([first, second]), atol=1e-6)


def test_packed_files_are_the_dataset_that_they_were(tmp_path):
    png_folder(tmp_path / "images", (("cats", 30), ("tree frogs", 12)), size=(9, 7))
    dataset = open_dataset(DataOptions(name="folder", root=str(tmp_path / "images")))
    archives = pack_dataset(dataset, tmp_path / "packed", shard_bytes=20_480)
    assert archives["train"] > 2 and all(path.stat().st_size <= 20_480 for path in (tmp_path / "packed").glob("*.tar"))
    packed = opened(tmp_path / "packed")
    for name in ("channels", "size", "classes", "mean", "std", "centre"):
        assert getattr(packed.spec, name) == getattr(dataset.spec, name)
    for part in ("train", "val", "test"):
        ours, theirs = packed.split(part), dataset.split(part)
        content = [sorted((int(s.labels[i]), s.read(i).tobytes()) for i in range(len(s))) for s in (ours, theirs)]
        assert content[0] == content[1]
    pack_dataset(dataset, tmp_path / "again", shard_bytes=20_480)
    for path in (tmp_path / "packed").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    with tarfile.open(tmp_path / "packed" / "train-000000.tar") as archive:  # numbers as labels, as other readers expect
        assert archive.getnames()[0].startswith("00000000_") and archive.getnames()[1].endswith(".cls")
    smaller = opened(tmp_path / "packed", size=6)
    assert smaller.spec.size == (6, 6) and smaller.train.read(0).shape == (3, 6, 6)


def test_packing_is_whole_or_not_there(tmp_path, refused, monkeypatch):
    png_folder(tmp_path / "images")
    dataset = open_dataset(DataOptions(name="folder", root=str(tmp_path / "images")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    with refused(tmp_path / "full", "holds files already"):
        pack_dataset(dataset, tmp_path / "full", shard_bytes=10**6)
    with refused("at least 1 byte, got 0"):
        pack_dataset(dataset, tmp_path / "out", shard_bytes=0)
    (tmp_path / "images" / "dogs" / "3.png").unlink()
    with refused("dogs/3.png: cannot be read"):
        pack_dataset(dataset, tmp_path / "out", shard_bytes=10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "images"]
    with refused("shards: its images are no files of their own"):
        pack_dataset(opened(write_shards(tmp_path / "shards", 2)), tmp_path / "out", shard_bytes=10**6)


def test_wrong_roots_are_refused(tmp_path, refused):
    with refused("no .tar archives", "revit data pack"):
        opened(tmp_path)
    (tmp_path / "train-0.tar.gz").write_bytes(b"\x1f\x8b")
    with refused("train-0.tar.gz: packed", "plain .tar"):
        opened(tmp_path)
    write_tar(tmp_path / "val-0.tar", samples(0, 4))
    with refused("no archive for training"):
        opened(tmp_path)
    write_tar(tmp_path / "train-0.tar", samples(0, 4))
    write_tar(tmp_path / "more.tar", samples(0, 4))
    with refused("more.tar: its name has none of the words"):
        opened(tmp_path)
    (tmp_path / "more.tar").rename(tmp_path / "train-test.tar")
    with refused("train-test.tar: its name has the words test and train"):
        opened(tmp_path)
    (tmp_path / "train-test.tar").unlink()
    write_tar(tmp_path / "val-0.tar", samples(0, 4, ("cat", "horse")))
    with refused("val-0.tar: an image has the label horse, but no training image has it"):
        opened(tmp_path)


def test_the_description_is_checked(tmp_path, refused):
    write_shards(tmp_path, archives=2)
    about = tmp_path / module.ABOUT
    for text in ("", "[]", "{}", '{"format": 1}', '{"format": 1, "spec": {"name": 1}}', 100_000 * "["):
        about.write_text(text)
        with refused(about, "pack the images again"):
            opened(tmp_path)
    about.unlink()
    spec = opened(tmp_path).spec.to_dict()
    values = {"format": 1, "spec": spec, "floating": False, "images": {"train": 10, "val": 0, "test": 0}}
    about.write_text(json.dumps(values))
    assert opened(tmp_path).spec.classes == ("cat", "dog")
    about.write_text(json.dumps({**values, "images": {"train": 11, "val": 0, "test": 0}}))
    with refused("10 training images in its archives, 11 in dataset.json"):
        opened(tmp_path)
    about.write_text(json.dumps({**values, "format": 2}))
    with refused("dataset.json: no description of archives"):
        opened(tmp_path)
    write_tar(tmp_path / "train-000001.tar", samples(5, 5, ("1", "2")))
    about.write_text(json.dumps(values))
    with refused("an image has the label 2, but dataset.json has 2 classes"):
        opened(tmp_path)


def test_bad_images_stop_or_are_skipped(tmp_path):
    write_shards(tmp_path, archives=3)
    write_tar(tmp_path / "train-000001.tar", [("bad.png", png(3)[:40]), ("bad.cls", b"cat"), *samples(5, 4)])
    with pytest.raises(BadImage, match=r"train-000001.tar/bad.png: not an image"):
        opened(tmp_path, test_fraction=0.01, val_fraction=0.01, split_seed=4)
    dataset = opened(tmp_path, on_bad="skip")
    loader = EvalLoader(dataset.train, dataset.spec, batch_size=4, reading=Reading(on_bad="skip", max_bad=0.2))
    bad = [entry for batch in loader for entry in batch.bad]
    assert len(bad) == 1 and bad[0][0].endswith("train-000001.tar/bad.png")


def test_an_archive_that_changes_under_us_is_noticed(tmp_path, refused):
    write_shards(tmp_path, archives=2)
    images = opened(tmp_path).train
    write_tar(tmp_path / "train-000000.tar", [("README", b"hello"), *samples(0, 5)])
    with refused("train-000000.tar: changed since it was opened"):
        for i in range(len(images)):
            images.files.close(0)
            images.read(i)
    (tmp_path / "train-000000.tar").unlink()
    with refused("train-000000.tar: cannot be read"):
        images.files.close(0)
        images.read(0)


def test_images_beyond_the_limit_are_not_read(tmp_path, monkeypatch):
    write_shards(tmp_path, archives=2)
    images = opened(tmp_path).train
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(BadImage, match="more than the 100 that are read"):
        images.read(0)


def _resident():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _read_all(root, sender):
    images = opened(root).train
    images.read(0)
    before = _resident()
    for i in range(len(images)):
        images.source(i)
    sender.send(_resident() - before)


def test_memory_stays_flat(tmp_path):
    """400 MB of images are passed over in a process whose memory hardly grows. The files have holes and take no disk."""
    junk = tarfile.TarInfo("x")
    for k in range(4):
        with open(tmp_path / f"train-{k}.tar", "wb") as file:
            for name, data in samples(0, 1) if k == 0 else []:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.write(info.tobuf() + data.ljust(-(-len(data) // 512) * 512, b"\0"))
            for i in range(10):
                junk.name, junk.size = f"z{i}.png", 10_240_000
                file.write(junk.tobuf())
                file.seek(junk.size, 1)
                label = tarfile.TarInfo(f"z{i}.cls")
                label.size = 3
                file.write(label.tobuf() + (b"cat" if i % 2 else b"dog").ljust(512, b"\0"))
            file.write(1024 * b"\0")
    spec = {
        "name": "s",
        "channels": 3,
        "size": [8, 8],
        "classes": ["cat", "dog"],
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "source": "x",
    }
    about = {"format": 1, "spec": {**spec, "centre": 1}, "floating": False, "images": {"train": 41, "val": 0, "test": 0}}
    (tmp_path / module.ABOUT).write_text(json.dumps(about))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read_all, args=(tmp_path, sender))
    process.start()
    process.join()
    assert receiver.poll() and receiver.recv() < 64 * 1024  # kB
