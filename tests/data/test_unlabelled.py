"""Images without labels: from files or from one .npz, the same pixels by the same checks."""

import io

import numpy as np
import pytest
from PIL import Image

from revit.data import image_files, unlabelled
from revit.data.file_images import Fit
from revit.data.finding import find_images
from revit.data.image_files import ImageBytes, image_header, read_image
from revit.data.spec import BadImage, Crop
from revit.data.unlabelled import open_images

RANDOM = np.random.default_rng(0)
KINDS = [((9, 6, 3), "PNG"), ((8, 8, 3), "JPEG"), ((7, 12), "BMP"), ((20, 20, 3), "WEBP")]
FIT = Fit(3, (8, 8), centre=0.9)
CANARY = b"cos\nsystem\n(S'touch canary'\ntR."


def encoded(array, form="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=form, **options)
    return buffer.getvalue()


def blobs():
    return [encoded(RANDOM.integers(0, 256, shape, dtype=np.uint8), form) for shape, form in KINDS]


def offsets_of(files):
    return np.cumsum([0, *map(len, files)])


def write(path, files, **arrays):
    arrays.setdefault("jpeg", np.frombuffer(b"".join(files), dtype=np.uint8))
    arrays.setdefault("offsets", offsets_of(files))
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


@pytest.mark.parametrize("crop", [None, Crop(0.3, 0.4, 0.6, 0.9)])
def test_an_npz_gives_what_the_files_give(tmp_path, crop):
    """Byte for byte the same images as separate files, which Pillow and the definition of the fit give."""
    files = blobs()
    (tmp_path / "in").mkdir()
    for i, content in enumerate(files):
        (tmp_path / "in" / f"{i}.png").write_bytes(content)  # the content decides on the format, not the name
    inside = open_images([write(tmp_path / "a.npz", files)], FIT)
    outside = open_images([str(tmp_path / "in")], FIT)
    assert len(inside) == len(outside) == 4
    for images in (inside, outside):
        assert images.labels.dtype == np.int64 and images.labels.tolist() == [0, 0, 0, 0]
    for i in range(4):
        image = inside.read(i, crop)
        assert image.shape == (3, 8, 8) and image.dtype == np.uint8
        np.testing.assert_array_equal(image, outside.read(i, crop))
    np.testing.assert_array_equal(
        open_images([str(tmp_path / "a.npz")], Fit(3, (9, 6))).read(0),
        np.asarray(Image.open(io.BytesIO(files[0]))).transpose(2, 0, 1),
    )


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = blobs()
    names = np.array(["cat", "a\nb\x1b[31m", "\ud800x", "y" * 1000])
    images = open_images([write("a.npz", files, names=names)], FIT)
    shown = ["a.npz, image 0 (cat)", r"a.npz, image 1 (a\nb\x1b[31m)", r"a.npz, image 2 (\ud800x)"]
    assert [images.name(i) for i in range(3)] == shown
    assert len(images.name(3)) == len("a.npz, image 3 ()") + 200
    images.name(2).encode()  # any terminal takes it
    assert open_images([write("b.npz", files)], FIT).name(3) == "b.npz, image 3"
    (tmp_path / "b.npz").rename("B.NPZ")
    assert open_images(["B.NPZ"], FIT).name(0) == "B.NPZ, image 0"


def test_files_folders_and_patterns_are_those_of_predict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "in/b.png", "in/deep/c.png", "in/.hidden.png", "in/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded(np.zeros((4, 4), np.uint8)))
    for patterns, names in (
        (["a.png"], ["a.png"]),
        (["a.png", "in", "./a.png"], ["a.png", "in/b.png", "in/deep/c.png"]),
        (["**/*.png"], ["a.png", "in/b.png", "in/deep/c.png"]),
    ):
        images = open_images(patterns, FIT)
        assert [images.name(i) for i in range(len(images))] == names == [str(path) for path in find_images(patterns)]
        assert len(images.labels) == len(names)


def test_nothing_to_open(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.npz", blobs())
    with refused("no images are named; give image files, folders, patterns or one .npz"):
        open_images([], FIT)
    with refused("b.npz: no such file or folder; check the name"):
        open_images(["b.npz"], FIT)
    with refused("a.npz: one of 2 names; an .npz is read alone, leave out the others"):
        open_images([".", "a.npz"], FIT)
    with refused(".: no images in this folder"):
        open_images(["."], FIT)
    with refused("*.npz: matches no images"):
        open_images(["*.npz"], FIT)


DAMAGE = [
    (b"", "empty, it has 0 bytes; replace or remove it"),
    (b"GARBAGE!" * 9, "not an image that can be read"),
    (CANARY, "not an image that can be read"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image that can be read"),  # would start Ghostscript
    (encoded(np.zeros((50, 50, 3), np.uint8))[:60], "damaged, it cannot be decoded"),
    (encoded(RANDOM.integers(0, 256, (50, 50, 3), dtype=np.uint8), "JPEG")[:400], "damaged, it cannot be decoded"),
    (b"P5 100000 100000 255\n" + bytes(9), "too many pixels (at most 64,000,000); cut or shrink it"),
    (b"P5 10000 10000 255\n" + bytes(9), "10000 x 10000 pixels are too many (at most 64,000,000); cut or shrink it"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGE, ids=range(len(DAMAGE)))
def test_broken_images_are_named_and_the_others_read(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    files = [*blobs()[:2], content, encoded(np.zeros((4, 4), np.uint8))]
    images = open_images([write("a.npz", files, names=np.array(["k", "l", "dented", "n"]))], FIT)
    with pytest.raises(BadImage) as caught:
        images.read(2)
    assert str(caught.value).startswith(f"a.npz, image 2 (dented): {message}") and "\n" not in str(caught.value)
    assert images.read(1).shape == images.read(3).shape == (3, 8, 8)
    assert not (tmp_path / "canary").exists()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_all_kinds_of_files_as_bytes(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    deep = RANDOM.integers(0, 65536, (6, 5, 3), dtype=np.uint16)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, deep, photometric="rgb")
    for content in (buffer.getvalue(), npy(deep)):
        np.testing.assert_array_equal(read_image(ImageBytes(content, "x")), deep.transpose(2, 0, 1) / np.float32(65535))
        assert image_header(ImageBytes(content, "x")) == (3, 6, 5, True)
        images = open_images([write(tmp_path / "a.npz", [content])], FIT)
        with pytest.raises(BadImage, match=r"a\.npz, image 0: more than 8 bits among images of 8"):
            images.read(0)
        assert open_images([write(tmp_path / "a.npz", [content])], Fit(3, (8, 8), floating=True)).read(0).dtype == np.float32
    with pytest.raises(BadImage, match=r"x: shorter than its array of shape \(6, 5, 3\) needs; copy it again"):
        read_image(ImageBytes(npy(deep)[:-1], "x"))
    turned = Image.Exif()
    turned[0x0112] = 6
    content = encoded(np.zeros((4, 9, 3), np.uint8), "JPEG", exif=turned)
    assert image_header(ImageBytes(content, "x"))[:3] == read_image(ImageBytes(content, "x")).shape == (3, 9, 4)


def test_the_limit_of_bytes_holds_for_bytes(monkeypatch):
    monkeypatch.setattr(image_files, "MAX_BYTES", 40)
    with pytest.raises(BadImage, match="x: 41 bytes, more than the 40 that are read; store it smaller"):
        read_image(ImageBytes(bytes(41), "x"))


WRONG = [
    ({"offsets": None}, "a.npz: has jpeg but no offsets; store jpeg (uint8"),
    ({"jpeg": None}, "a.npz: has offsets but no jpeg; store jpeg (uint8"),
    ({"jpeg": None, "offsets": None}, "a.npz: holds neither jpeg nor test_images; store jpeg (uint8"),
    ({"jpeg": np.zeros(9, np.int8)}, "a.npz: jpeg must be uint8 [bytes], got [9] of int8"),
    ({"jpeg": np.zeros((3, 3), np.uint8)}, "a.npz: jpeg must be uint8 [bytes], got [3, 3] of uint8"),
    ({"offsets": np.array([0])}, "a.npz: offsets must be at least two whole numbers [N + 1], got [1] of int64"),
    ({"offsets": np.array([0.0, 4.0])}, "a.npz: offsets must be at least two whole numbers [N + 1], got [2] of float64"),
    ({"offsets": np.array([[0, 4]])}, "a.npz: offsets must be at least two whole numbers [N + 1], got [1, 2] of int64"),
    ({"offsets": np.array([0, 9, 4])}, "a.npz: offsets go back from 9 to 4 at image 1; store np.cumsum of the lengths"),
    ({"offsets": np.array([0, 9, 4], np.uint64)}, "a.npz: offsets go back from 9 to 4 at image 1"),
    ({"offsets": np.array([-1, 4])}, "a.npz: offsets go from -1 to 4, but jpeg has"),
    ({"offsets": np.array([0, 10**9])}, "a.npz: offsets go from 0 to 1000000000, but jpeg has"),
    ({"offsets": np.array([0, 2**64 - 1], np.uint64)}, "a.npz: offsets go from 0 to 18446744073709551615, but jpeg has"),
    ({"names": np.array(["a", "b"])}, "a.npz: names must be 4 texts, got [2] of <U1; store np.array(names) or none"),
    ({"names": np.arange(4)}, "a.npz: names must be 4 texts, got [4] of int64"),
    ({"names": np.full(4, 2**31 - 1, np.int32).view("<U1")}, "a.npz: names are damaged"),
    ({"names": np.array([open, 1, 2, 3], dtype=object)}, "a.npz: names holds Python objects, which are not loaded"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arrays(tmp_path, monkeypatch, refused, arrays, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        open_images([write("a.npz", blobs(), **arrays)], FIT)


def test_files_that_are_no_npz(tmp_path, refused, monkeypatch):
    path = tmp_path / "a.npz"
    for content in (b"", b"no zip", CANARY):
        path.write_bytes(content)
        with refused("a.npz: cannot be read", "numpy.savez"):
            open_images([str(path)], FIT)
    write(path, blobs())
    monkeypatch.setattr(unlabelled, "MAX_IMAGES", 3)
    with refused("a.npz: offsets stand for 4 images, at most 3 are read; make several files"):
        open_images([str(path)], FIT)


def test_arrays_are_fitted(tmp_path, refused):
    path = tmp_path / "a.npz"
    colour, grey = RANDOM.integers(0, 256, (5, 10, 12, 3), dtype=np.uint8), RANDOM.integers(0, 256, (5, 10, 12), dtype=np.uint8)
    np.savez(path, test_images=colour, test_labels=np.arange(5))
    images = open_images([str(path)], Fit(3, (10, 10)))
    assert len(images) == 5 and images.labels.tolist() == [0] * 5 and images.name(4) == f"{path}, image 4"
    np.testing.assert_array_equal(images.read(2), colour[2].transpose(2, 0, 1)[:, :, 1:11])
    images.read(2)[:] = 0
    assert images.read(2).any()
    np.testing.assert_array_equal(
        open_images([str(path)], Fit(3, (6, 8), centre=0.6)).read(0), colour[0].transpose(2, 0, 1)[:, 2:8, 2:10]
    )
    np.savez(path, test_images=grey)
    repeated = open_images([str(path)], Fit(3, (10, 12), floating=True)).read(1)
    np.testing.assert_array_equal(repeated, np.stack([grey[1]] * 3) / np.float32(255))
    with refused("a.npz: test_images have 1 channels, the model takes 4; store as many"):
        open_images([str(path)], Fit(4, (10, 10)))
    np.savez(path, test_images=grey.astype(np.float32))
    with refused("a.npz: test_images must be uint8 [N, H, W] or [N, H, W, C]"):
        open_images([str(path)], FIT)
