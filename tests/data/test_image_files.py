"""Each format against arrays that are known, and files of which none may do more harm than one `BadImage`."""

import os
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from revit.data import image_files
from revit.data.image_files import image_header, is_image_name, printable, read_image
from revit.data.spec import BadImage
from tests.data.image_checks import COLOUR, DEEP, GREY, RANDOM, bad, check, images_left, turned_upright


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.pgm", "a.tif", "a.PNG"])
def test_grey_has_one_channel(tmp_path, name):
    Image.fromarray(GREY).save(tmp_path / name)
    check(tmp_path / name, GREY)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tif", "a.webp"])
def test_colour_has_three(tmp_path, name):
    Image.fromarray(COLOUR).save(tmp_path / name, lossless=True)
    check(tmp_path / name, COLOUR)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_deflate", "packbits"])
def test_tiff_compressions_of_pictures(tmp_path, compression):
    Image.fromarray(COLOUR).save(tmp_path / "a.tif", compression=compression)
    check(tmp_path / "a.tif", COLOUR)


def test_jpeg_is_near_the_smooth_image_that_was_saved(tmp_path):
    ramp = np.add.outer(np.arange(40), 2 * np.arange(32)).astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / "grey.jpg", quality=95)
    Image.fromarray(np.stack([ramp, ramp[::-1], ramp], axis=-1)).save(tmp_path / "colour.jpeg", quality=95, subsampling=0)
    assert np.abs(read_image(tmp_path / "grey.jpg")[0].astype(int) - ramp).max() <= 3
    assert np.abs(read_image(tmp_path / "colour.jpeg")[1].astype(int) - ramp[::-1]).max() <= 6


def test_cmyk_becomes_rgb(tmp_path):
    inks = np.zeros((8, 8, 4), dtype=np.uint8)
    inks[..., 0] = 255  # cyan only: no red
    for name in ("a.jpg", "a.tif"):
        Image.fromarray(inks, mode="CMYK").save(tmp_path / name)
        image = read_image(tmp_path / name)
        assert image.shape == (3, 8, 8) and image_header(tmp_path / name).channels == 3
        assert image[0].max() <= 2 and image[1:].min() >= 253


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_are_scaled(tmp_path, name):
    Image.fromarray(DEEP).save(tmp_path / name)
    check(tmp_path / name, DEEP.astype(np.float32) / 65535)


def test_one_bit(tmp_path):
    bits = GREY > 128
    for name in ("a.png", "a.pbm", "a.tif"):
        Image.fromarray(bits).save(tmp_path / name)
        check(tmp_path / name, np.where(bits, 255, 0).astype(np.uint8))


def test_alpha_is_dropped(tmp_path):
    for name in ("a.png", "a.tif", "a.webp"):
        opaque_and_clear = np.dstack([COLOUR, GREY | 1])  # WebP may forget the colour where nothing shows it
        Image.fromarray(opaque_and_clear).save(tmp_path / name, lossless=True)
        check(tmp_path / name, COLOUR)
    Image.fromarray(np.dstack([GREY, GREY[::-1]])).save(tmp_path / "la.png")
    check(tmp_path / "la.png", GREY)


def test_palette_with_transparency(tmp_path):
    indices = GREY % 4
    palette = np.array([[255, 0, 0], [0, 255, 0], [10, 20, 30], [7, 7, 7]], dtype=np.uint8)
    image = Image.fromarray(indices, mode="P")
    image.putpalette(palette.tobytes())
    for name, transparency in (("bytes.png", bytes([0, 128, 255, 255])), ("index.png", 1), ("index.gif", 1)):
        image.save(tmp_path / name, transparency=transparency)
        check(tmp_path / name, palette[indices])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(COLOUR)
    image.save(tmp_path / "a.png", exif=exif)
    image.save(tmp_path / "a.tif", tiffinfo={274: orientation})
    upright = turned_upright(COLOUR, orientation)
    if orientation == 6:
        np.testing.assert_array_equal(upright, np.rot90(COLOUR, -1))
    check(tmp_path / "a.png", upright)
    check(tmp_path / "a.tif", upright)


def test_turned_jpeg(tmp_path):
    ramp = np.add.outer(np.arange(40), 2 * np.arange(32)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(ramp).save(tmp_path / "a.jpg", quality=95, exif=exif)
    image = read_image(tmp_path / "a.jpg")
    assert image.shape == (1, 32, 40) == image_header(tmp_path / "a.jpg")[:3]
    assert np.abs(image[0].astype(int) - np.rot90(ramp)).max() <= 3


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0rubbish" * 9, b"Exif\0\0II*\0\x08\0\0\0\x09\0\x12\x01", b"Exif\0\0MM\0*\xff\xff\xff\xff"]
)
def test_broken_exif_spoils_nothing(tmp_path, exif):
    Image.fromarray(np.full((9, 9), 70, dtype=np.uint8)).save(tmp_path / "a.jpg", exif=exif)
    check(tmp_path / "a.jpg", np.full((9, 9), 70, dtype=np.uint8))


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif"])
def test_animation_gives_its_first_frame(tmp_path, name):
    first = np.dstack([GREY] * 3)
    frames = [Image.fromarray(np.roll(first, i, axis=0)) for i in range(3)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
    check(tmp_path / name, first)


def test_one_pixel(tmp_path):
    Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").ravel().tolist() == [1, 2, 3]


def test_content_decides_not_the_name(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.jpg", format="PNG")
    np.save(tmp_path / "b.npy", GREY)
    (tmp_path / "b.npy").rename(tmp_path / "b.tif")
    check(tmp_path / "a.jpg", COLOUR)
    check(tmp_path / "b.tif", GREY)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "f2", "f4", ">f8"])
def test_npy(tmp_path, dtype):
    array = RANDOM.integers(0, 256, (7, 5, 3)).astype(dtype)
    expected = array.astype("u1") if dtype == "u1" else array.astype(np.float32) / np.float32(65535 if dtype[1] == "u" else 1)
    np.save(tmp_path / "last.npy", array)
    np.save(tmp_path / "first.npy", array.transpose(2, 0, 1))  # in the order of Fortran
    np.save(tmp_path / "grey.npy", array[..., 0])
    check(tmp_path / "last.npy", expected)
    check(tmp_path / "first.npy", expected)
    check(tmp_path / "grey.npy", expected[..., 0])


def test_npy_channel_last_wins_ties(tmp_path):
    array = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    np.save(tmp_path / "a.npy", array)
    check(tmp_path / "a.npy", array)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((7, 5), np.int64), "values are int64"),
        (np.zeros((7, 5), complex), "values are complex128"),
        (np.array([[None]]), "values are object"),
        (np.zeros(5, np.uint8), "2 or 3 axes"),
        (np.zeros((2, 3, 7, 5), np.uint8), "2 or 3 axes"),
        (np.zeros((0, 5), np.uint8), "no pixels"),
        (np.zeros((70, 80, 90), np.uint8), "70 channels"),
        (np.full((7, 5), np.inf), "not finite"),
        (np.full((7, 5), 1e300), "not finite"),
    ],
)
def test_bad_npy(tmp_path, array, match):
    np.save(tmp_path / "a.npy", array)
    bad(tmp_path / "a.npy", match)


def test_npy_is_checked_before_it_is_read(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.zeros((100, 100), np.uint8))
    whole = (tmp_path / "a.npy").read_bytes()
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kwargs: pytest.fail("read"))
    (tmp_path / "a.npy").write_bytes(whole[:-1])
    bad(tmp_path / "a.npy", "shorter than its array")
    (tmp_path / "a.npy").write_bytes(whole.replace(b"(100, 100), }", b"(9**9, 99), }"))
    bad(tmp_path / "a.npy", "damaged")
    (tmp_path / "a.npy").write_bytes(whole.replace(b"(100, 100), }", b"(99999, 9**9,)"[:13]))
    bad(tmp_path / "a.npy", "damaged")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x03\0" + whole[8:])
    bad(tmp_path / "a.npy", "version")
    monkeypatch.setattr(image_files, "MAX_PIXELS", 9_999)
    (tmp_path / "a.npy").write_bytes(whole)
    bad(tmp_path / "a.npy", "100 x 100 pixels are too many")


def png(height, width):
    """A black PNG of one bit per pixel, made without its pixels in memory."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    packer, row = zlib.compressobj(1), bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_001, 10_000, 20_000])  # above our limit, above Pillow's warning, above Pillow's error
def test_bombs_are_not_decoded(tmp_path, monkeypatch, side):
    (tmp_path / "small.png").write_bytes(png(9, 11))
    check(tmp_path / "small.png", np.zeros((9, 11), np.uint8))
    (tmp_path / "bomb.png").write_bytes(png(side, side))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    bad(tmp_path / "bomb.png", "too many")
    with pytest.raises(BadImage, match="too many"):
        image_header(tmp_path / "bomb.png")


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.webp", "a.bmp", "a.tif", "a.ppm"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated(tmp_path, name, share, capfd):
    noise = RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(share * len(data))])
    bad(tmp_path / name, "damaged")
    assert capfd.readouterr() == ("", "")


def test_things_that_are_no_images(tmp_path):
    (tmp_path / "empty.png").touch()
    bad(tmp_path / "empty.png", "0 bytes")
    (tmp_path / "text.png").write_text("path,label\n")
    bad(tmp_path / "text.png", "not an image that can be read")
    (tmp_path / "folder.png").mkdir()
    bad(tmp_path / "folder.png", "a folder, not an image file")
    bad(tmp_path / "none.png", "no such file")
    (tmp_path / "link.png").symlink_to("gone.png")
    bad(tmp_path / "link.png", "a link to gone.png, which does not exist")
    (tmp_path / "loop.png").symlink_to("loop.png")
    bad(tmp_path / "loop.png", "damaged|levels of symbolic links")
    os.mkfifo(tmp_path / "pipe.png")
    bad(tmp_path / "pipe.png", "not a regular file")


def test_file_that_may_not_be_read(tmp_path, monkeypatch):
    Image.fromarray(GREY).save(tmp_path / "a.png")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(image_files, "open", refuse, raising=False)  # root may read everything
    bad(tmp_path / "a.png", r"no permission to read it; try chmod \+r")


def test_names_that_cannot_be_printed(tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"caf\xe9\n.png"))
    Image.fromarray(GREY).save(path)
    check(path, GREY)
    assert printable(path).endswith("caf\\xe9\\n.png") and printable("größe 1.png") == "größe 1.png"
    with open(path, "w"):
        bad(path, "0 bytes")


def test_suffixes():
    assert is_image_name("n01440764_10026.JPEG") and is_image_name("a.b.tiff")
    assert not is_image_name("png") and not is_image_name("notes.txt") and not is_image_name("a.svg")


def test_random_damage_never_escapes(tmp_path):
    """Bytes are changed at random: the result is an image or a `BadImage`, without warnings (which are errors here)."""
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    Image.fromarray(COLOUR).save(tmp_path / "a.jpg", exif=Image.Exif())
    Image.fromarray(COLOUR).save(tmp_path / "a.tif", tiffinfo={274: 6})
    Image.fromarray(GREY).save(tmp_path / "a.gif")
    np.save(tmp_path / "a.npy", COLOUR)
    random = np.random.default_rng(1)
    images = sum(images_left(tmp_path / name, random, 60) for name in ("a.png", "a.jpg", "a.tif", "a.gif", "a.npy"))
    assert 0 < images < 300
