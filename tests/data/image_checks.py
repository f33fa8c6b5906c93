"""Arrays to save as images, and what tests of image files ask of reading them."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from revit.data.image_files import image_header, printable, read_image
from revit.data.spec import BadImage

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (7, 5), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (7, 5, 3), dtype=np.uint8)
DEEP = RANDOM.integers(0, 65536, (7, 5), dtype=np.uint16)


def check(path, expected):
    """Pixels and header, where the expected array is [H, W] or [H, W, C]."""
    expected = expected[None] if expected.ndim == 2 else expected.transpose(2, 0, 1)
    image = read_image(path)
    assert image.dtype == expected.dtype and image.flags.c_contiguous and image.flags.writeable
    np.testing.assert_array_equal(image, expected)
    assert image_header(path) == (*expected.shape, expected.dtype == np.float32)


def bad(path, match):
    """Reading fails in one line that names the file and the reason."""
    with pytest.raises(BadImage, match=match) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{printable(path)}: ") and "\n" not in str(caught.value) and ";" in str(caught.value)


def turned_upright(array, orientation):
    """The image [H, W, C] as Pillow shows it for an EXIF orientation."""
    image = Image.fromarray(array)
    image.getexif()[0x0112] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


def images_left(path, random, times):
    """How many of so many copies, in which three of the first 300 bytes are changed, are images; others are `BadImage`."""
    data, images = np.fromfile(path, dtype=np.uint8), 0
    for _ in range(times):
        broken = data.copy()
        broken[random.integers(0, min(len(data), 300), 3)] = random.integers(0, 256, 3)
        broken.tofile(path.with_name("broken"))
        try:
            assert read_image(path.with_name("broken")).ndim == 3
            images += 1
        except BadImage:
            continue
    return images
