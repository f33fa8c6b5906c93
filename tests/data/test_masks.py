"""Image and mask folders: what is read, how it is split, augmented alike, and every kind of damage by name."""

import numpy as np
import pytest
import torch
from PIL import Image

from revit.data import DataOptions, open_dataset
from revit.data.augment import AugmentOptions, augment_masks
from revit.data.loader import EvalLoader, TrainLoader
from revit.data.masks import read_mask
from revit.data.resize import crop_and_resize, crop_and_resize_mask, resize_mask
from revit.data.spec import BadImage, Crop, DataError, DataSpec
from tests.data.shapes import shape_folder, shapes


def opened(root, **options):
    return open_dataset(DataOptions(name="masks", root=str(root), **options))


def save(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    (image if mode is None else image.convert(mode)).save(path)


@pytest.mark.parametrize("memory_gb", [2.0, 0.0])
def test_images_come_with_their_masks(tmp_path, memory_gb):
    images, masks = shapes(12, 16)
    dataset = opened(shape_folder(tmp_path), memory_gb=memory_gb)
    spec = dataset.spec
    assert (spec.task, spec.classes, spec.size, spec.channels) == ("segmentation", ("0", "1", "2"), (16, 16), 1)
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [9, 1, 2]
    assert "test: 0.2 of all images, seed 0" in spec.source
    seen = set()
    for part in ("train", "val", "test"):
        split = dataset.split(part)
        for i in range(len(split)):
            number = int(split.name(i).split("/")[-1].removesuffix(".png"))
            pixels, mask = split.read_masked(i)
            np.testing.assert_array_equal(pixels[0], images[number])
            np.testing.assert_array_equal(mask, masks[number])
            np.testing.assert_array_equal(split.read(i), pixels)
            seen.add(number)
    assert seen == set(range(12))
    again = opened(tmp_path, split_seed=1)
    assert [again.test.name(i) for i in range(2)] != [dataset.test.name(i) for i in range(2)]


def test_the_description_survives_json():
    spec = DataSpec("masks", 1, (8, 8), ("a", "b"), (0.5,), (0.5,), "here", task="segmentation")
    assert DataSpec.from_dict(spec.to_dict()) == spec
    plain = DataSpec("folder", 1, (8, 8), ("a", "b"), (0.5,), (0.5,), "here")
    assert "task" not in plain.to_dict() and DataSpec.from_dict(plain.to_dict()).task == "classification"
    with pytest.raises(DataError, match="unknown task 'detection'"):
        DataSpec("x", 1, (8, 8), ("a", "b"), (0.5,), (0.5,), "here", task="detection")


def test_parts_and_names_of_classes(tmp_path, refused):
    shape_folder(tmp_path, 4, parts=("train", "Validation", "test"))
    (tmp_path / "classes.txt").write_text("ground\ndisc\nsquare\nnever seen\n")
    dataset = opened(tmp_path)
    assert dataset.spec.classes == ("ground", "disc", "square", "never seen")
    assert [len(dataset.split(part)) for part in ("train", "val", "test")] == [4, 4, 4]
    assert "fraction" not in dataset.spec.source and "train/images" in dataset.train.name(0)
    (tmp_path / "classes.txt").write_text("ground\n")
    with refused("classes.txt", "1 lines", "2 to 255 different names"):
        opened(tmp_path)
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe\x00")
    with refused("classes.txt", "cannot be read as text"):
        opened(tmp_path)


def damage(tmp_path, name):
    """Twelve pairs, the mask of one of which is replaced."""
    root = shape_folder(tmp_path / "data")
    return root, root / "masks" / name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: save(path, np.zeros((8, 9))), ["8 x 9 pixels, but its image", "has 16 x 16", "nearest pixel"]),
        (lambda path: save(path, np.zeros((16, 16)), "P"), ["a palette image", "save them as grey"]),
        (lambda path: save(path, np.zeros((16, 16, 3))), ["a colour image (RGB)", "8-bit grey PNG"]),
        (lambda path: save(path, np.zeros((16, 16, 4))), ["a colour image (RGBA)", "8-bit grey PNG"]),
        (lambda path: Image.fromarray(np.zeros((16, 16), np.uint16)).save(path), ["more than 8 bits", "8-bit grey PNG"]),
        (lambda path: path.write_bytes(b""), ["empty, it has 0 bytes"]),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), ["damaged, it cannot be decoded"]),
        (lambda path: path.write_bytes(b"not an image at all"), ["not a PNG file"]),
        (lambda path: path.unlink(), ["5.png: has no mask", "masks/5.png", "add the mask or remove the image"]),
        (lambda path: Image.fromarray(np.zeros((16, 16), np.uint8)).save(path, "JPEG"), ["a JPEG file, which may change"]),
    ],
)
def test_bad_masks_are_named_and_can_be_skipped(tmp_path, refused, make, words):
    root, path = damage(tmp_path, "5.png")
    make(path)
    with refused("5.png", "1 of 12 images cannot be used", "--on-bad skip", *words):
        opened(root)
    dataset = opened(root, on_bad="skip", max_bad=0.1)
    assert sum(len(dataset.split(part)) for part in ("train", "val", "test")) == 11 and len(dataset.skipped) == 1


def test_values_beyond_the_classes_are_named(tmp_path, refused):
    root = shape_folder(tmp_path, 4, parts=("train", "val", "test"))
    save(root / "test/masks/2.png", np.full((16, 16), 7))
    with refused("test/masks/2.png", "has the class 7, but the training masks end at 2", "classes.txt"):
        opened(root)
    (root / "classes.txt").write_text("a\nb")
    with refused("has the class 2, but classes.txt ends at 1"):
        opened(root)


def test_black_and_white_masks_are_not_taken_for_ignored_ones(tmp_path, refused):
    images, masks = shapes(6, 16)
    for i in range(6):
        save(tmp_path / f"images/{i}.png", images[i])
        save(tmp_path / f"masks/{i}.png", np.where(masks[i] == 1, 255, 0))
    with refused("hold no class but 0", "0 and 1, not 0 and 255"):
        opened(tmp_path)
    for i in range(6):
        save(tmp_path / f"masks/{i}.png", np.where(masks[i] == 1, 255, 0), "1")  # one bit: 0 and 1
    assert opened(tmp_path).spec.num_classes == 2
    np.testing.assert_array_equal(read_mask(tmp_path / "masks/3.png"), masks[3] == 1)


def test_folders_that_are_none(tmp_path, refused):
    with refused("has no folder images", "ROOT/images"):
        opened(tmp_path)
    (tmp_path / "images").mkdir()
    with refused("has no folder masks"):
        opened(tmp_path)
    (tmp_path / "masks").mkdir()
    with refused("masks", "no images in this folder"):
        opened(tmp_path)
    save(tmp_path / "images/a.png", np.zeros((8, 8)))
    save(tmp_path / "masks/b.png", np.zeros((8, 8)))
    with refused("no image has a mask", "a.png", "masks/a.png"):
        opened(tmp_path)
    save(tmp_path / "images/a.bmp", np.zeros((8, 8)))
    with refused("a.png", "a.bmp has the same name before the dot"):
        opened(tmp_path)
    (tmp_path / "images/a.bmp").unlink()
    save(tmp_path / "masks/a.png", np.zeros((8, 8)))
    with refused("too few to split off a test part"):
        opened(tmp_path)
    root = shape_folder(tmp_path / "most")
    for i in range(4):
        (root / f"images/{i}.png").write_bytes(b"")
    with refused("4 of 12 images cannot be read", "--data.max_bad"):
        opened(root, on_bad="skip", max_bad=0.3)


def test_masks_are_cut_and_resized_with_their_images(tmp_path):
    """An image that is its mask: wherever the resized image is even, the mask is the same class."""
    mask = np.kron(np.arange(12).reshape(3, 4) % 3, np.ones((8, 8))).astype(np.uint8)  # 24 x 32
    colours = np.array([0, 90, 250], np.uint8)
    for size, crop in (((12, 16), None), ((16, 16), None), ((10, 10), Crop(0.4, 0.3, 0.2, 0.9))):
        small, image = crop_and_resize_mask(mask, size, crop), crop_and_resize(colours[mask][None], size, crop)[0]
        assert small.shape == size and set(np.unique(small)) <= {0, 1, 2}
        even = np.isin(image, colours)
        assert even.mean() > 0.3
        np.testing.assert_array_equal(colours[small[even]], image[even])
    for factor in (2, 3):
        np.testing.assert_array_equal(resize_mask(mask, (24 * factor, 32 * factor)), np.kron(mask, np.ones((factor, factor))))
    for i in range(6):
        save(tmp_path / f"images/{i}.png", 80 * mask)
        save(tmp_path / f"masks/{i}.png", mask)
    dataset = opened(tmp_path, size=12)
    assert dataset.spec.size == (12, 12) and dataset.train.read_masked(0)[1].shape == (12, 12)


def loader(root, **augment):
    dataset = opened(root)
    return dataset, TrainLoader(dataset.train, dataset.spec, batch_size=16, augment=AugmentOptions(**augment))


@pytest.mark.parametrize("augment", [{"rotate": 180, "rotate_step": 90}, {"flip": True, "flip_vertical": True}, {"shift": 3}])
def test_augmentation_moves_image_and_mask_alike(tmp_path, augment):
    """Images that are their masks, so that after any exact move each pixel can be compared."""
    _, masks = shapes(10, 16)
    for i, mask in enumerate(np.where(masks == 255, 0, masks)):
        save(tmp_path / f"images/{i}.png", 100 + 50 * mask)
        save(tmp_path / f"masks/{i}.png", mask)
    dataset, train = loader(tmp_path, **augment)
    for epoch in range(2):
        (batch,) = next(train.batches(epoch))
        assert batch.labels.shape == (len(dataset.train), 16, 16) and batch.labels.dtype == torch.int64
        x, targets = train.prepare(batch, epoch, torch.device("cpu"), torch.float64)
        pixels = 255 * (x * dataset.spec.std[0] + dataset.spec.mean[0])[:, 0]
        outside = targets == 255
        assert outside.any() == ("shift" in augment) and not torch.equal(targets, batch.labels)
        torch.testing.assert_close(pixels[~outside], 100 + 50 * targets[~outside].double(), rtol=0, atol=1e-2)
        assert pixels[outside].abs().max() < 1e-6 if outside.any() else True
    evaluated = next(iter(EvalLoader(dataset.val, dataset.spec, batch_size=4)))
    assert evaluated.labels.shape[1:] == (16, 16)


def test_any_angle_leaves_classes_whole():
    masks = torch.from_numpy(shapes(4, 24)[1]).long()
    options = AugmentOptions(rotate=180, fill="reflection")
    moved = augment_masks(masks, options, np.arange(4), 0, 0)
    assert set(moved.unique().tolist()) <= set(masks.unique().tolist())  # no class between two others
    assert (augment_masks(masks, AugmentOptions(rotate=180), np.arange(4), 0, 0) == 255).sum() > (masks == 255).sum()
    assert augment_masks(masks, AugmentOptions(brightness=0.1), np.arange(4), 0, 0) is masks


def test_crops_and_mixing(tmp_path, refused):
    _, train = loader(shape_folder(tmp_path), crop_scale=0.3)
    (batch,) = next(train.batches(0))
    assert batch.images.shape[-2:] == batch.labels.shape[-2:] == (16, 16)
    with refused("mixup and cutmix", "--augment.mixup 0"):
        loader(tmp_path, mixup=0.2)
    with pytest.raises(BadImage, match="nothing.png: no such file"):
        read_mask(tmp_path / "nothing.png")
