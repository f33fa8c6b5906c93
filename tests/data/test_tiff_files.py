"""TIFF files that hold more than a picture, against arrays that are known."""

import sys

import numpy as np
import pytest

from revit.data import image_files
from revit.data.image_files import read_image
from revit.data.spec import BadImage, DataError
from tests.data.image_checks import COLOUR, GREY, RANDOM, bad, check, images_left, turned_upright

tifffile = pytest.importorskip("tifffile")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((7, 5, 6), {"planarconfig": "contig"}),
        ((7, 5, 2), {"planarconfig": "contig"}),  # unnamed channels, not grey with alpha
        ((2, 2, 4), {"planarconfig": "contig"}),  # the file says which axis is which
    ],
)
def test_tiff_with_many_channels(tmp_path, shape, options):
    array = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack", **options)
    check(tmp_path / "a.tif", array)


@pytest.mark.parametrize(
    "options", [{}, {"imagej": True, "metadata": {"axes": "CYX"}}, {"ome": True, "metadata": {"axes": "CYX"}}]
)
def test_tiff_with_a_page_for_each_channel(tmp_path, options):
    array = RANDOM.integers(0, 256, (4, 7, 5), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack", **options)
    check(tmp_path / "a.tif", array.transpose(1, 2, 0))


@pytest.mark.parametrize("axes", ["ZYX", "TYX"])
def test_tiff_of_times_or_depths_gives_the_first(tmp_path, axes):
    array = RANDOM.integers(0, 65536, (4, 7, 5), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, imagej=True, metadata={"axes": axes})
    check(tmp_path / "a.tif", array[0].astype(np.float32) / 65535)


def test_tiff_with_16_bit_colours(tmp_path):
    array = RANDOM.integers(0, 65536, (7, 5, 4), dtype=np.uint16)
    scaled = array[..., :3].astype(np.float32) / 65535
    for name, pixels, options in (
        ("plain.tif", array[..., :3], {}),
        ("packed.tif", array[..., :3], {"compression": "zlib"}),
        ("big.tif", array[..., :3], {"bigtiff": True, "byteorder": ">"}),
        ("alpha.tif", array, {}),
    ):
        tifffile.imwrite(tmp_path / name, pixels, photometric="rgb", **options)
        check(tmp_path / name, scaled)
    tifffile.imwrite(tmp_path / "planes.tif", array[..., :3].transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    check(tmp_path / "planes.tif", scaled)


def test_tiff_of_floats(tmp_path):
    array = RANDOM.normal(size=(7, 5, 3)).astype(np.float32)
    tifffile.imwrite(tmp_path / "colour.tif", array, photometric="rgb")
    tifffile.imwrite(tmp_path / "grey.tif", array[..., 0])
    check(tmp_path / "colour.tif", array)
    check(tmp_path / "grey.tif", array[..., 0])
    array[3, 2] = np.nan
    tifffile.imwrite(tmp_path / "grey.tif", array[..., 0])
    bad(tmp_path / "grey.tif", "not finite")


def test_tiff_that_is_no_image(tmp_path, capfd, caplog):
    tifffile.imwrite(tmp_path / "ints.tif", GREY.astype(np.int32))
    bad(tmp_path / "ints.tif", "values are int32; save it as uint8")
    tifffile.imwrite(tmp_path / "volume.tif", np.zeros((2, 3, 7, 5), np.uint16), ome=True, metadata={"axes": "ZCYX"})
    bad(tmp_path / "volume.tif", "axes are ZCYX")
    tifffile.imwrite(tmp_path / "many.tif", np.zeros((66, 66, 65), np.uint8), photometric="minisblack", planarconfig="contig")
    bad(tmp_path / "many.tif", "65 channels, more than 64")
    assert capfd.readouterr() == ("", "") and not caplog.records  # Pillow has an opinion on 65 channels


def test_packages_that_are_missing(tmp_path, monkeypatch):
    """The image may be fine, so this is no `BadImage` that could be skipped."""
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((7, 5, 3), np.uint16), photometric="rgb")
    for package in ("tifffile", "PIL"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match="a.tif: .*pip install") as caught:
            read_image(tmp_path / "a.tif")
        assert not isinstance(caught.value, BadImage)


def test_codec_that_is_missing(tmp_path, monkeypatch):
    def asarray(self, **options):
        raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", asarray)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((7, 5, 3), np.uint16), photometric="rgb")
    with pytest.raises(DataError, match="pip install imagecodecs"):
        read_image(tmp_path / "a.tif")


def test_truncated_deep_tiff(tmp_path, capfd):
    tifffile.imwrite(tmp_path / "a.tif", RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint16), photometric="rgb")
    data = (tmp_path / "a.tif").read_bytes()
    for size in (9, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "a.tif").write_bytes(data[:size])
        bad(tmp_path / "a.tif", "damaged")
    assert capfd.readouterr() == ("", "")


def test_16_bit_cmyk_becomes_rgb(tmp_path):
    inks = np.zeros((8, 8, 4), dtype=np.uint16)
    inks[..., 0] = 65535  # cyan only: no red
    tifffile.imwrite(tmp_path / "a.tif", inks, photometric="separated")
    check(tmp_path / "a.tif", np.full((8, 8, 3), (0, 255, 255), dtype=np.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_deep_colours(tmp_path, orientation):
    tag = (274, "H", 1, orientation)
    tifffile.imwrite(tmp_path / "a.tif", COLOUR.astype(np.uint16), photometric="rgb", extratags=[tag])
    check(tmp_path / "a.tif", turned_upright(COLOUR, orientation).astype(np.float32) / 65535)


def test_limits(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((7, 5, 3), np.uint16), photometric="rgb")
    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", lambda *args, **kwargs: pytest.fail("decoded"))
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "MAX_PIXELS", 34)
        bad(tmp_path / "a.tif", "7 x 5 pixels are too many")
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "MAX_SAMPLES", 104)
        bad(tmp_path / "a.tif", "7 x 5 pixels are too many")
    monkeypatch.setattr(image_files, "MAX_BYTES", 99)
    bad(tmp_path / "a.tif", "bytes, more than the 99")


def test_random_damage_never_escapes(tmp_path):
    """Bytes are changed at random: the result is an image or a `BadImage`, without warnings (which are errors here)."""
    tifffile.imwrite(tmp_path / "a.tif", COLOUR.astype(np.uint16), photometric="rgb")
    assert 0 < images_left(tmp_path / "a.tif", np.random.default_rng(0), 100) < 100
