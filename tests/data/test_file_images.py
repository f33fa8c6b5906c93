"""Turning a file and reading it is reading it and turning the array: exactly, and after resizing up to rounding."""

import numpy as np
import pytest
from PIL import Image

from revit.data.file_images import Fit
from revit.data.image_files import read_image
from revit.data.resize import crop_and_resize
from revit.data.spec import BadImage

RANDOM = np.random.default_rng(0)
TURNS = [(r, mirrored) for r in range(4) for mirrored in (False, True)]


def turned(array, r, mirrored, axes=(-2, -1)):
    return np.rot90(np.flip(array, axes[1]) if mirrored else array, r, axes)


@pytest.mark.parametrize(("r", "mirrored"), TURNS)
def test_turned_png_gives_the_turned_array(tmp_path, r, mirrored):
    array = RANDOM.integers(0, 256, (9, 6, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    Image.fromarray(np.ascontiguousarray(turned(array, r, mirrored, axes=(0, 1)))).save(tmp_path / "b.png")
    np.testing.assert_array_equal(read_image(tmp_path / "b.png"), turned(read_image(tmp_path / "a.png"), r, mirrored))


@pytest.mark.parametrize("centre", [1.0, 224 / 256])
@pytest.mark.parametrize("size", [(40, 53), (53, 40), (41, 41), (7, 30), (16, 16), (17, 16)])
@pytest.mark.parametrize(("r", "mirrored"), TURNS)
def test_turning_commutes_with_resizing(tmp_path, size, centre, r, mirrored):
    """Also where an odd number of pixels is cut off, which must not all come from one side."""
    array = RANDOM.normal(size=size)
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "b.npy", turned(array, r, mirrored))
    fit = Fit(1, (16, 16), floating=True, centre=centre)
    plain, other = fit.read(str(tmp_path / "a.npy")), fit.read(str(tmp_path / "b.npy"))
    np.testing.assert_allclose(other, turned(plain, r, mirrored), atol=2e-6)


def test_centre_is_what_shorter_side_256_and_crop_224_show(tmp_path):
    """A bright frame of 1/16 of the shorter side, and all that is beside the square, is not looked at."""
    array = np.full((256, 320), 1.0, dtype=np.float32)
    array[16:240, 48:272] = 0.5
    np.save(tmp_path / "a.npy", array)
    image = Fit(1, (224, 224), floating=True, centre=224 / 256).read(str(tmp_path / "a.npy"))
    assert image.shape == (1, 224, 224) and (image == 0.5).all()
    assert Fit(1, (224, 224), floating=True).read(str(tmp_path / "a.npy"))[0, 0].min() > 0.99


def test_rectangles_are_cut_from_the_centre():
    ramp = np.tile(np.arange(12, dtype=np.float32), (1, 4, 1))
    np.testing.assert_array_equal(crop_and_resize(ramp, (4, 4))[0, 0], [4, 5, 6, 7])
    np.testing.assert_array_equal(crop_and_resize(ramp.swapaxes(1, 2), (4, 4))[0, :, 0], [4, 5, 6, 7])
    assert crop_and_resize(ramp, (2, 6)).shape == (1, 2, 6)
    assert crop_and_resize(ramp, (1, 100)).shape == (1, 1, 100)
    assert crop_and_resize(ramp[:, :1, :1], (5, 3)).shape == (1, 5, 3)


def test_deeper_images_among_flat_ones_are_bad(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4), dtype=np.uint16))
    with pytest.raises(BadImage, match="a.npy: more than 8 bits among images of 8"):
        Fit(1, (4, 4)).read(str(tmp_path / "a.npy"))
