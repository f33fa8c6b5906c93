"""Turning digits: quarter turns are exact, other angles are bilinear by definition."""

import math

import numpy as np
import pytest

from revit.data import rotation
from revit.data.rotation import turn_digits


def random_images(count, height=9, width=9):
    return np.random.default_rng(0).integers(0, 256, (count, height, width), dtype=np.uint8)


@pytest.mark.parametrize("quarters", [0, 1, 2, 3, 4, -1])
@pytest.mark.parametrize("side", [9, 28])
def test_quarter_turns_are_rot90(quarters, side):
    images = random_images(5, side, side)
    turned = turn_digits(images, np.full(5, 90.0 * quarters))
    np.testing.assert_array_equal(turned, np.rot90(images, quarters, axes=(1, 2)))


def test_half_turn_of_oblong_images():
    images = random_images(3, 5, 8)
    np.testing.assert_array_equal(turn_digits(images, np.full(3, 180.0)), images[:, ::-1, ::-1])


def by_hand(image, degrees):
    """Bilinear interpolation at each point turned back, written out."""
    height, width = image.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    result = np.zeros(image.shape)
    for y in range(height):
        for x in range(width):
            right, up = x - (width - 1) / 2, (height - 1) / 2 - y
            source_x = cos * right + sin * up + (width - 1) / 2
            source_y = (height - 1) / 2 - (cos * up - sin * right)
            for py in (math.floor(source_y), math.floor(source_y) + 1):
                for px in (math.floor(source_x), math.floor(source_x) + 1):
                    if 0 <= py < height and 0 <= px < width:
                        result[y, x] += (1 - abs(source_y - py)) * (1 - abs(source_x - px)) * image[py, px]
    return result


def test_any_angle_against_the_definition():
    images, degrees = random_images(4, 7, 8), np.array([17.0, 45.0, 200.5, 359.0])
    turned = turn_digits(images, degrees)
    for image, angle, result in zip(images, degrees, turned, strict=True):
        assert np.abs(result - by_hand(image, angle)).max() <= 0.5 + 1e-9


def test_chunks_do_not_matter(monkeypatch):
    images, degrees = random_images(10), np.linspace(0, 300, 10)
    whole = turn_digits(images, degrees)
    monkeypatch.setattr(rotation, "CHUNK", 3)
    np.testing.assert_array_equal(turn_digits(images, degrees), whole)
    assert turn_digits(images[:0], degrees[:0]).shape == (0, 9, 9)


def test_angles_must_fit():
    with pytest.raises(ValueError, match=r"got shape \[3, 9, 9\] and 2 angles"):
        turn_digits(random_images(3), np.zeros(2))
