"""The look at all images: statistics against numpy, the choice of size and channels, and the cache."""

import os

import numpy as np
import pytest
from PIL import Image

from revit.data import file_images, scan
from revit.data.cache import cache_folder
from revit.data.scan import scan_images
from revit.data.spec import DataError

RANDOM = np.random.default_rng(0)


def write(folder, sizes, channels=3):
    """Random PNG files of these sizes (height, width), and their arrays."""
    paths, arrays = [], []
    for i, size in enumerate(sizes):
        array = RANDOM.integers(0, 256, (*size, channels) if channels > 1 else size, dtype=np.uint8)
        Image.fromarray(array).save(folder / f"{i:03d}.png")
        paths.append(str(folder / f"{i:03d}.png"))
        arrays.append(array)
    return paths, arrays


def look(paths, size=None, train=None, progress=None):
    train = np.ones(len(paths), dtype=bool) if train is None else np.array(train)
    return scan_images(paths, train, os.path.dirname(paths[0]), size, progress)


def count_reads(monkeypatch):
    """The files that are decoded from now on."""
    read, real = [], file_images.read_image

    def counting(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(file_images, "read_image", counting)
    return read


def test_statistics_are_those_of_the_training_images(tmp_path):
    paths, arrays = write(tmp_path, [(8, 6)] * 5)
    found = look(paths, train=[True, False, True, True, False])
    pixels = np.concatenate([arrays[i].reshape(-1, 3) for i in (0, 2, 3)]) / 255
    np.testing.assert_allclose(found.mean, pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.std, pixels.std(axis=0), rtol=1e-9)
    assert (found.channels, found.size, found.floating, found.one_size, found.bad) == (3, (8, 6), False, True, ())


def test_statistics_are_those_of_resized_images(tmp_path):
    """Resizing averages, so noise has a smaller deviation in the size that the model sees."""
    paths, arrays = write(tmp_path, [(32, 32)] * 4)
    full, small = look(paths), look(paths, size=8)
    assert small.size == (8, 8) and not small.one_size
    assert max(small.std) < 0.6 * min(full.std)
    np.testing.assert_allclose(small.mean, np.concatenate([a.reshape(-1, 3) for a in arrays]).mean(axis=0) / 255, atol=0.01)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(20, 30)] * 3, (20, 30)),
        ([(100, 225)] * 3, (100, 100)),
        ([(300, 260)] * 3, (224, 224)),
        ([(10, 30), (40, 20), (50, 60)], (20, 20)),
        ([(300, 300), (301, 300), (20, 30)], (224, 224)),
    ],
)
def test_default_size(tmp_path, sizes, expected):
    assert look(write(tmp_path, sizes, channels=1)[0]).size == expected


@pytest.mark.parametrize(
    ("channels", "expected", "bad"),
    [
        ([1, 1, 3], 3, []),
        ([3, 1, 3], 3, []),
        ([5, 5, 3], 5, [2]),
        ([1, 1, 5], 1, [2]),
        ([1, 5, 5], 5, [0]),
        ([3, 3, 1, 4], 3, [3]),
    ],
)
def test_channels(tmp_path, channels, expected, bad):
    paths = []
    for i, number in enumerate(channels):
        np.save(tmp_path / f"{i}.npy", RANDOM.integers(0, 256, (9, 9, number), dtype=np.uint8))
        paths.append(str(tmp_path / f"{i}.npy"))
    found = look(paths)
    assert found.channels == len(found.mean) == expected and [i for i, _ in found.bad] == bad


def test_second_look_decodes_nothing(tmp_path, monkeypatch):
    paths, _ = write(tmp_path, [(8, 8)] * 4)
    read = count_reads(monkeypatch)
    first = look(paths)
    assert sorted(read) == paths
    headers = []
    monkeypatch.setattr(scan, "image_header", headers.append)
    assert look(paths) == first and len(read) == 4 and not headers


@pytest.fixture
def decodes(tmp_path, monkeypatch):
    """How many files a look at them decodes."""
    paths, _ = write(tmp_path, [(8, 8)] * 4)
    read = count_reads(monkeypatch)

    def count(**options):
        before = len(read)
        look(sorted(map(str, tmp_path.glob("*.png"))), **options)
        return len(read) - before

    assert count() == len(paths)
    return count


def test_what_makes_a_second_look_necessary(tmp_path, decodes):
    assert decodes(size=4) == 4
    assert decodes(train=[True, True, True, False]) == 4
    assert decodes() == decodes(size=4) == 0
    os.utime(tmp_path / "000.png", (1, 1))
    assert (decodes(), decodes()) == (4, 0)
    os.rename(tmp_path / "001.png", tmp_path / "x.png")
    assert (decodes(), decodes()) == (4, 0)


@pytest.mark.parametrize("rubbish", ["{}", "no JSON", "[1, 2]", '{"channels": 3, "size": [8]}'])
def test_spoilt_cache(decodes, rubbish):
    for path in (cache_folder() / "scans").iterdir():
        path.write_text(rubbish)
    assert (decodes(), decodes()) == (4, 0)


def test_moved_folder_is_known_again(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    paths, _ = write(tmp_path / "a", [(8, 8)] * 2)
    first, read = look(paths), count_reads(monkeypatch)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert look([str(tmp_path / "b" / os.path.basename(path)) for path in paths]) == first and not read


def test_bad_files_are_kept_and_tried_again(tmp_path, monkeypatch):
    paths, _ = write(tmp_path, [(8, 8)] * 4)
    whole = (tmp_path / "001.png").read_bytes()
    (tmp_path / "001.png").write_bytes(whole[:45] + bytes(len(whole) - 45))
    (tmp_path / "003.png").write_bytes(b"")
    found = look(paths)
    assert [(i, text.split()[0]) for i, text in found.bad] == [(1, "damaged,"), (3, "empty,")]
    read = count_reads(monkeypatch)
    assert look(paths) == found and sorted(read) == [paths[1], paths[3]]
    before = os.stat(paths[1])
    (tmp_path / "001.png").write_bytes(whole)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # like chmod: neither bytes nor time show it
    assert [i for i, _ in look(paths).bad] == [3]


def test_many_images_are_sampled(tmp_path, monkeypatch):
    paths, arrays = write(tmp_path, [(8, 8)] * 20)
    (tmp_path / "007.png").write_bytes(b"text")
    monkeypatch.setattr(scan, "MAX_DECODED", 5)
    read = count_reads(monkeypatch)
    found = look(paths)
    assert 4 <= len(read) <= 5 and read == sorted(read)
    assert [i for i, _ in found.bad] == [7]  # the headers of all are read
    chosen = np.concatenate([arrays[paths.index(path)].reshape(-1, 3) for path in read]) / 255
    np.testing.assert_allclose(found.mean, chosen.mean(axis=0), rtol=1e-12)


def test_progress_counts_to_the_end(tmp_path):
    paths, _ = write(tmp_path, [(8, 8)] * 3)
    (tmp_path / "001.png").write_bytes(b"")
    steps = []
    look(paths, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, 6) for i in range(1, 7)]


def test_no_training_image(tmp_path):
    paths, _ = write(tmp_path, [(8, 8)] * 3)
    (tmp_path / "000.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the training images can be read; the first: .*000.png: empty"):
        look(paths, train=[True, False, False])


def test_missing_codec_is_not_taken_for_bad_images(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile")

    def asarray(self, **options):
        raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

    tifffile.imwrite(tmp_path / "a.tif", np.zeros((7, 5, 3), np.uint16), photometric="rgb")
    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", asarray)
    with pytest.raises(DataError, match="pip install imagecodecs"):
        look([str(tmp_path / "a.tif")])


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REVIT_CACHE", str(tmp_path / "file" / "cache"))
    assert look(write(tmp_path, [(8, 8)] * 2)[0]).size == (8, 8)
