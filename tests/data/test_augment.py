"""Augmentation against the plain operations that it must be, and image by image whatever the batch is."""

import numpy as np
import pytest
import torch

from revit.data.augment import AugmentOptions, augment, augment_masks, crops, mix, partners
from revit.data.spec import Crop


def images(count=6, channels=3, height=12, width=12):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


EVERYTHING = AugmentOptions(
    rotate=180,
    shift=2,
    zoom=0.1,
    shear=0.1,
    elastic=1.0,
    flip=True,
    flip_vertical=True,
    brightness=0.3,
    contrast=0.3,
    saturation=0.3,
    hue=0.1,
)


def test_nothing_by_default():
    x = images()
    assert augment(x, AugmentOptions(), np.arange(6), 0, 0) is x


def test_an_image_does_not_depend_on_its_batch():
    x = images()
    whole = augment(x, EVERYTHING, np.arange(6), 3, 1)
    for i in range(6):
        alone = augment(x[i : i + 1], EVERYTHING, np.array([i]), 3, 1)
        assert torch.allclose(alone[0], whole[i], atol=1e-14, rtol=0)
    assert not torch.allclose(whole, augment(x, EVERYTHING, np.arange(6), 3, 2))  # another epoch


def test_quarter_turns_are_rot90():
    x = images(64)
    turned = augment(x, AugmentOptions(rotate=180, rotate_step=90), np.arange(64), 0, 0)
    found = []
    for before, after in zip(x, turned, strict=True):
        matches = [k for k in range(4) if torch.allclose(torch.rot90(before, k, (-2, -1)), after, atol=1e-12)]
        assert len(matches) == 1
        found += matches
    assert set(found) == {0, 1, 2, 3}
    assert max(found.count(k) for k in range(4)) < 32  # no angle is drawn twice as often


def test_bicubic_and_fourier_turns_blur_less_and_stay_in_range():
    """A wave of three pixels, turned: closer to the wave that is drawn at that angle."""
    y, x = torch.meshgrid(*(torch.arange(33, dtype=torch.float64) - 16,) * 2, indexing="ij")

    def wave(degrees):
        angle = np.radians(degrees)
        return (0.5 + 0.5 * torch.cos((x * np.cos(angle) - y * np.sin(angle)) * 2 * np.pi / 3))[None, None]

    errors = {}
    for name in ("bilinear", "bicubic", "fourier"):
        options = AugmentOptions(rotate=30, rotate_step=30, interpolation=name)
        turned = augment(wave(0).expand(16, 1, 33, 33), options, np.arange(16), 0, 0)
        assert turned.min() >= 0 and turned.max() <= 1
        inside = (slice(None), 0, slice(8, 25), slice(8, 25))
        errors[name] = [min((image[inside[1:]] - wave(a)[0][inside[1:]]).abs().max() for a in (30, -30)) for image in turned]
    turned_away = [a > 1e-9 and a < 0.5 for a in errors["bilinear"]]
    assert sum(turned_away) > 4  # the others were left as they are
    for better, worse in (("bicubic", "bilinear"), ("fourier", "bicubic")):
        pairs = zip(errors[better], errors[worse], turned_away, strict=True)
        assert all(b < 0.5 * a for b, a, moved in pairs if moved)
    for name in ("bicubic", "fourier"):
        torch.testing.assert_close(
            augment(images(), AugmentOptions(rotate=180, rotate_step=90, interpolation=name), np.arange(6), 0, 0),
            augment(images(), AugmentOptions(rotate=180, rotate_step=90), np.arange(6), 0, 0),
        )  # pixels onto pixels


@pytest.mark.parametrize("size", [8, 9])
def test_fourier_interpolation_is_that_of_the_discrete_transform(size):
    """Waves with fewer than half a turn a pixel are drawn between the pixels as they are; sizes need not be equal."""
    from revit.data.augment import _doubled

    place = torch.arange(2 * size - 1, dtype=torch.float64) / 2
    for k in range((size + 1) // 2):
        wave = torch.cos(2 * torch.pi * k * place / size + 0.3)
        column = torch.cos(2 * torch.pi * place[:9] / 5 - 1)  # 5 pixels
        torch.testing.assert_close(_doubled(column[::2, None] * wave[::2]), column[:, None] * wave, atol=1e-12, rtol=0)


def test_steps_of_45_degrees():
    x = images(64, 1, 33, 33)
    turned = augment(x, AugmentOptions(rotate=180, rotate_step=45), np.arange(64), 0, 0)
    quarter = sum(
        any(torch.allclose(torch.rot90(before, k, (-2, -1)), after, atol=1e-9) for k in range(4))
        for before, after in zip(x, turned, strict=True)
    )
    assert 20 <= quarter <= 44  # half of the eight steps


def test_small_steps_stay_within_the_angle():
    options = AugmentOptions(rotate=30, rotate_step=15)
    x = torch.zeros(200, 1, 41, 41, dtype=torch.float64)
    x[:, :, 20, 40] = 1  # a point at 0 degrees, seen from the centre
    turned = augment(x, options, np.arange(200), 0, 0)
    where = turned.flatten(1).argmax(1)
    angles = np.degrees(np.arctan2(20 - (where // 41).numpy(), (where % 41).numpy() - 20))
    assert set(np.round(angles / 15).astype(int)) == {-2, -1, 0, 1, 2}


def test_turns_are_counter_clockwise_as_everywhere_here():
    x = torch.zeros(400, 1, 41, 41, dtype=torch.float64)
    x[:, :, 20, 38] = 1
    turned = augment(x, AugmentOptions(rotate=20, rotate_step=20), np.arange(400), 0, 0)
    from revit.data.randomness import uniforms

    draws = uniforms(np.arange(400), 5, 0, 0, "geometry")[:, 0]
    steps = np.floor(draws * 3) - 1  # -20, 0, 20 degrees
    rows = (turned.flatten(1).argmax(1) // 41).numpy()
    assert (rows[steps > 0] < 20).all() and (rows[steps < 0] > 20).all() and (rows[steps == 0] == 20).all()


def test_shift_moves_whole_pixels_and_brings_in_black():
    x = images(40)
    shifted = augment(x, AugmentOptions(shift=3), np.arange(40), 0, 0)
    seen = set()
    for before, after in zip(x, shifted, strict=True):
        padded = torch.nn.functional.pad(before, (3, 3, 3, 3))
        places = [
            (dy, dx)
            for dy in range(7)
            for dx in range(7)
            if torch.allclose(padded[:, dy : dy + 12, dx : dx + 12], after, atol=1e-9)
        ]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) > 15


def test_flips_are_flips():
    x = images(40)
    for options, axis in ((AugmentOptions(flip=True), -1), (AugmentOptions(flip_vertical=True), -2)):
        result = augment(x, options, np.arange(40), 0, 0)
        flipped = [torch.allclose(after, before.flip(axis), atol=1e-9) for before, after in zip(x, result, strict=True)]
        kept = [torch.allclose(after, before, atol=1e-9) for before, after in zip(x, result, strict=True)]
        assert all(a != b for a, b in zip(flipped, kept, strict=True))
        assert 8 < sum(flipped) < 32


def test_turning_is_about_the_centre_at_even_and_odd_sizes():
    for size in (12, 13):
        x = images(30, 1, size, size)
        turned = augment(x, AugmentOptions(rotate=180, rotate_step=180), np.arange(30), 0, 0)
        assert all(
            torch.allclose(a, b, atol=1e-9) or torch.allclose(a, b.flip(-1, -2), atol=1e-9)
            for a, b in zip(turned, x, strict=True)
        )


@pytest.mark.parametrize("option", ["brightness", "contrast", "saturation", "hue"])
def test_colours_change_and_stay_in_range(option):
    x = images(16)
    changed = augment(x, AugmentOptions(**{option: 0.4}), np.arange(16), 0, 0)
    assert changed.shape == x.shape and changed.min() >= 0 and changed.max() <= 1
    assert not torch.allclose(changed, x)


def test_brightness_multiplies():
    x = 0.5 * images(50, 1)
    ratio = augment(x, AugmentOptions(brightness=0.2), np.arange(50), 0, 0) / x
    factors = ratio.flatten(1)
    assert torch.allclose(factors.amax(1), factors.amin(1))
    assert 0.8 <= factors.min() < 0.9 and 1.1 < factors.max() <= 1.2


def test_grey_images_have_no_colour_to_change():
    x = images(4, 1)
    assert augment(x, AugmentOptions(saturation=0.5, hue=0.5), np.arange(4), 0, 0) is x


def test_crops_have_the_area_and_shape_that_was_asked_for():
    boxes = crops(AugmentOptions(crop_scale=0.08), np.arange(2000), 0, 0)
    shares = []
    for crop in boxes:
        top, left, tall, wide = crop.box(300, 400)
        assert 0 <= top <= 300 - tall and 0 <= left <= 400 - wide
        shares.append(tall * wide / (300 * 400))
    assert 0.07 < min(shares) < 0.1 and 0.85 < max(shares) <= 1
    assert crops(AugmentOptions(), np.arange(3), 0, 0) is None


def test_whole_crop_is_the_whole_image():
    assert Crop(1.0, 0.5, 0.3, 0.3).box(24, 24) == (0, 0, 24, 24)


def test_mixup_is_a_weighted_sum_of_images_and_targets():
    x, other = images(200), images(200).flip(1) + 1
    targets, other_targets = torch.eye(2, dtype=torch.float64)[[0] * 200], torch.eye(2, dtype=torch.float64)[[1] * 200]
    mixed, soft = mix(x, other, targets, other_targets, AugmentOptions(mixup=0.4), np.arange(200), 0, 0)
    share = soft[:, 0]
    assert torch.allclose(mixed, share[:, None, None, None] * x + (1 - share)[:, None, None, None] * other)
    assert torch.allclose(soft.sum(1), torch.ones(200, dtype=torch.float64))
    assert abs(share.mean() - 0.5) < 0.1 and share.std() > 0.3  # beta(0.4, 0.4) is bimodal: deviation 0.37


def test_cutmix_is_a_rectangle_and_targets_are_its_area():
    x, other = torch.zeros(100, 1, 20, 20), torch.ones(100, 1, 20, 20)
    targets, other_targets = torch.eye(2)[[0] * 100], torch.eye(2)[[1] * 100]
    mixed, soft = mix(x, other, targets, other_targets, AugmentOptions(cutmix=1.0), np.arange(100), 0, 0)
    assert torch.allclose(mixed.mean(dim=(1, 2, 3)), soft[:, 1])
    for image in mixed[:, 0]:
        rows, columns = image.amax(1).nonzero().flatten(), image.amax(0).nonzero().flatten()
        if len(rows):
            assert image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].min() == 1
            assert image.sum() == len(rows) * len(columns)


def test_mixup_and_cutmix_share_the_images():
    x, other = torch.zeros(200, 1, 8, 8), torch.ones(200, 1, 8, 8)
    targets = torch.eye(2)[[0] * 200]
    mixed, _ = mix(x, other, targets, targets, AugmentOptions(mixup=1.0, cutmix=1.0), np.arange(200), 0, 0)
    hard = sum(bool(((image == 0) | (image == 1)).all()) for image in mixed)
    assert 70 < hard < 130


def test_partners_are_others_and_belong_to_the_sample():
    one = np.array([0, 50])
    found = partners(np.arange(50), one, 0, 0)
    assert not np.any(found == np.arange(50)) and found.min() >= 0 and found.max() < 50
    assert np.array_equal(partners(np.array([7, 9]), one, 0, 0), found[[7, 9]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": -1}, "augment.shift must be 0 or more, got -1"),
        ({"hue": 0.7}, "augment.hue must be at most 0.5, got 0.7"),
        ({"contrast": 2}, "augment.contrast must be at most 1, got 2"),
        ({"fill": "grey"}, "augment.fill must be zeros, border, reflection, got 'grey'"),
        ({"interpolation": "nearest"}, "augment.interpolation must be bilinear, bicubic, fourier, got 'nearest'"),
        ({"rotate": 10, "rotate_step": 45}, "augment.rotate_step"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AugmentOptions(**options)


def ramps(size):
    """Two channels whose values are their own coordinates, x and y: a moved image shows where each pixel came from."""
    y, x = torch.meshgrid(*(torch.arange(size, dtype=torch.float64),) * 2, indexing="ij")
    return torch.stack([x, y])


def linear_maps(moved, size):
    """The map about the centre from new to old coordinates of each image of moved ramps, [B, 2, 2], from its inner pixels."""
    inside = slice(size // 2 - 3, size // 2 + 4)
    window = moved[:, :, inside, inside]
    return torch.stack([(window[..., -1] - window[..., 0]).mean(-1), (window[..., -1, :] - window[..., 0, :]).mean(-1)], -1) / 6


def test_zoom_changes_the_size_and_nothing_else():
    size = 41
    moved = augment(ramps(size).expand(200, 2, size, size), AugmentOptions(zoom=0.2), np.arange(200), 0, 0)
    assert torch.allclose(moved[:, :, 20, 20], torch.full((200, 2), 20.0, dtype=torch.float64), atol=1e-9)  # about the centre
    maps = linear_maps(moved, size)
    factors = 1 / maps[:, 0, 0]
    assert torch.allclose(maps, torch.eye(2, dtype=torch.float64) / factors[:, None, None], atol=1e-9)
    assert 0.8 <= factors.min() < 0.83 and 1.17 < factors.max() <= 1.2 and abs(factors.mean() - 1) < 0.03


def test_shear_keeps_areas_and_one_line_of_any_direction():
    size = 41
    moved = augment(ramps(size).expand(400, 2, size, size), AugmentOptions(shear=0.3), np.arange(400), 0, 0)
    maps = linear_maps(moved, size)
    assert torch.allclose(torch.linalg.det(maps), torch.ones(400, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(maps.diagonal(dim1=1, dim2=2).sum(-1), torch.full((400,), 2.0, dtype=torch.float64), atol=1e-9)
    slopes = torch.linalg.matrix_norm(maps - torch.eye(2, dtype=torch.float64))  # of a shear: the length of its only term
    assert 0.27 < slopes.max() <= 0.3 and slopes.min() < 0.03
    kept = torch.linalg.svd(maps - torch.eye(2, dtype=torch.float64)).Vh[:, 1]  # the line that stays
    directions = torch.atan2(kept[:, 1], kept[:, 0]) % np.pi
    assert torch.histc(directions, 4, 0, np.pi).min() > 60


def test_elastic_moves_pixels_smoothly_by_little():
    size = 28
    moved = augment(ramps(size).expand(100, 2, size, size), AugmentOptions(elastic=1.5), np.arange(100), 0, 0)
    inside = moved[:, :, 4:-4, 4:-4] - ramps(size)[:, 4:-4, 4:-4]
    assert 1 < inside.abs().max() < 1.5 * 1.6  # between the nodes it can be more than at them
    assert abs(inside.mean()) < 0.05 and 0.4 < inside.std() < 1
    steps = inside.diff(dim=-1).abs()
    assert steps.max() < 1  # no pixel passes another: the image does not fold
    assert (inside.flatten(1).std(1) > 0.2).all()  # no mere shift
    small = augment(ramps(size).expand(100, 2, size, size), AugmentOptions(elastic=0.15), np.arange(100), 0, 0)
    torch.testing.assert_close(10 * (small - ramps(size))[:, :, 4:-4, 4:-4], inside, atol=1e-9, rtol=0)


def test_bent_masks_stay_with_their_images():
    options = AugmentOptions(rotate=180, shift=2, zoom=0.2, shear=0.2, elastic=1.5, flip=True, fill="border")
    y, x = torch.meshgrid(*(torch.arange(40),) * 2, indexing="ij")
    masks = ((x - 14) ** 2 + (y - 22) ** 2 < 80).long().expand(12, 40, 40)
    shown = augment(masks[:, None].double(), options, np.arange(12), 0, 0)[:, 0]
    moved = augment_masks(masks, options, np.arange(12), 0, 0)
    assert (moved == (shown > 0.5)).double().mean() > 0.99 and not torch.equal(moved, masks)


@pytest.mark.parametrize("options", [{"zoom": 1.0}, {"shear": 1.2}, {"elastic": -1.0}])
def test_bends_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"augment.{next(iter(options))} must be"):
        AugmentOptions(**options)
