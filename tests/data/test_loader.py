"""Batches: the same for any number of workers, from any step on, and shared by processes without a gap or a double."""

import numpy as np
import pytest
import torch

from revit.data import ArrayImages, BadImage, DataError, DataSpec
from revit.data.augment import AugmentOptions
from revit.data.loader import EvalLoader, Reading, Share, TrainLoader, epoch_batches

SPEC = DataSpec("toy", 1, (6, 6), ("a", "b"), (0.25,), (0.5,), "made here")
CPU = torch.device("cpu")


def toy(count=50):
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (count, 1, 6, 6), dtype=np.uint8)
    return ArrayImages(pixels, np.arange(count) % 2, "toy/train")


class Partly(ArrayImages):
    """Images of which some cannot be read; no fast path, as with files."""

    read_many = None

    def __init__(self, bad, count=50):
        whole = toy(count)
        super().__init__(whole.images, whole.labels, "toy/train")
        self.bad = set(bad)

    def read(self, index, crop=None):
        if index in self.bad:
            raise BadImage(f"{self.name(index)}: truncated; replace it")
        return super().read(index, crop)


def epoch(loader, number=0, start=0):
    return [
        [(part.samples, *loader.prepare(part, number, CPU, torch.float32)) for part in step]
        for step in loader.batches(number, start)
    ]


def same(one, other):
    assert len(one) == len(other)
    for parts, others in zip(one, other, strict=True):
        for (samples, x, y), (samples2, x2, y2) in zip(parts, others, strict=True):
            assert np.array_equal(samples, samples2) and torch.equal(x, x2) and torch.equal(y, y2)


def test_batches_are_of_nearly_equal_size_and_lose_nothing():
    for length, size in ((50, 16), (50, 7), (3, 64), (64, 64), (65, 64), (1, 1)):
        batches = epoch_batches(toy(length), size, 0, 0, "order")
        sizes = [len(batch) for batch in batches]
        assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
        assert sorted(np.concatenate(batches)) == list(range(length))


@pytest.mark.parametrize("options", [{}, {"rotate": 180, "shift": 1}, {"mixup": 0.5, "cutmix": 0.5}, {"crop_scale": 0.3}])
def test_workers_do_not_matter(options):
    make = [
        TrainLoader(toy(), SPEC, batch_size=16, seed=4, augment=AugmentOptions(**options), reading=Reading(workers=workers))
        for workers in (0, 2)
    ]
    same(epoch(make[0], 1), epoch(make[1], 1))


def test_an_epoch_can_begin_anywhere():
    loader = TrainLoader(toy(), SPEC, batch_size=8, augment=AugmentOptions(rotate=180, mixup=0.3))
    whole = epoch(loader, 2)
    for start in (1, 3, len(whole) - 1):
        same(epoch(loader, 2, start), whole[start:])


def test_epochs_differ_and_seeds_differ():
    orders = [
        np.concatenate(
            [part.samples for step in TrainLoader(toy(), SPEC, batch_size=8, seed=seed).batches(number) for part in step]
        )
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], orders[2])


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_each_batch(world):
    whole = [parts[0] for parts in TrainLoader(toy(), SPEC, batch_size=16).batches(0)]
    shares = [
        [parts[0] for parts in TrainLoader(toy(), SPEC, batch_size=16, reading=Reading(Share(rank, world))).batches(0)]
        for rank in range(world)
    ]
    for step, batch in enumerate(whole):
        together = np.concatenate([share[step].samples for share in shares])
        assert np.array_equal(together, batch.samples)
        assert all(share[step].planned == len(batch.samples) for share in shares)


def test_parts_of_a_step_are_the_step():
    whole = TrainLoader(toy(), SPEC, batch_size=16)
    parted = TrainLoader(toy(), SPEC, batch_size=16, parts=3)
    for (batch,), parts in zip(whole.batches(0), parted.batches(0), strict=True):
        assert len(parts) == 3
        assert np.array_equal(np.concatenate([part.samples for part in parts]), batch.samples)
        assert all(part.planned == len(batch.samples) for part in parts)


def test_images_are_normalised_and_targets_one_hot():
    images = toy(4)
    loader = TrainLoader(images, SPEC, batch_size=4)
    ((batch,),) = loader.batches(0)
    x, targets = loader.prepare(batch, 0, CPU, torch.float64)
    expected = (images.images[batch.samples] / 255 - 0.25) / 0.5
    assert np.allclose(x.numpy(), expected, atol=1e-12)
    assert np.array_equal(targets.numpy(), np.eye(2)[images.labels[batch.samples]])


def test_mixing_takes_the_partner_from_the_whole_split():
    images = toy()
    loader = TrainLoader(images, SPEC, batch_size=10, augment=AugmentOptions(mixup=1.0))
    for (batch,) in loader.batches(0):
        _, targets = loader.prepare(batch, 0, CPU, torch.float64)
        assert torch.allclose(targets.sum(1), torch.ones(len(targets), dtype=torch.float64))
        outside = [i for i, pixels in enumerate(batch.other) if not any(torch.equal(pixels, own) for own in batch.images)]
        assert outside  # a batch of 10 of 50 has partners elsewhere


def test_evaluation_reads_each_image_once_over_all_processes():
    loaders = [EvalLoader(toy(23), SPEC, batch_size=4, reading=Reading(Share(rank, 3))) for rank in range(3)]
    seen = np.concatenate([batch.samples for loader in loaders for batch in loader])
    assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_stops_with_its_own_message(workers):
    loader = TrainLoader(Partly({7}), SPEC, batch_size=16, reading=Reading(workers=workers))
    with pytest.raises(DataError, match=r"^toy/train/7: truncated; replace it$"):
        list(loader.batches(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_and_reported(workers):
    loader = TrainLoader(Partly({7, 30}), SPEC, batch_size=16, reading=Reading(workers=workers, on_bad="skip", max_bad=0.04))
    batches = [step[0] for step in loader.batches(0)]
    assert sorted(np.concatenate([b.samples for b in batches])) == [i for i in range(50) if i not in (7, 30)]
    assert sorted(name for b in batches for name, _ in b.bad) == ["toy/train/30", "toy/train/7"]
    assert sum(b.planned for b in batches) == 50  # what is missing weighs nothing; the others weigh what they did


def test_an_image_whose_partner_is_bad_stays_alone():
    images = Partly({0}, 8)
    loader = TrainLoader(
        images, SPEC, batch_size=8, augment=AugmentOptions(mixup=0.5), reading=Reading(on_bad="skip", max_bad=1)
    )
    ((batch,),) = loader.batches(0)
    x, _ = loader.prepare(batch, 0, CPU, torch.float64)
    assert len(x) == 7 and torch.isfinite(x).all() and batch.other.shape == batch.images.shape


@pytest.mark.parametrize("workers", [0, 2])
def test_more_bad_images_than_allowed_are_an_error(workers):
    loader = TrainLoader(Partly({7, 30}), SPEC, batch_size=16, reading=Reading(workers=workers, on_bad="skip", max_bad=0.02))
    with pytest.raises(DataError, match="2 of 50 images cannot be read, more than the 0.02 .*truncated.*--data.max_bad"):
        list(loader.batches(0))


def test_a_batch_without_any_good_image_is_an_error():
    loader = TrainLoader(Partly(range(50)), SPEC, batch_size=10, reading=Reading(on_bad="skip"))
    with pytest.raises(DataError, match="none of the 10 images of a batch can be read"):
        list(loader.batches(0))


def test_too_few_images_for_so_many_processes():
    with pytest.raises(DataError, match="4 training images in batches of 64 cannot be shared by 3 processes in 2 parts"):
        TrainLoader(toy(4), SPEC, batch_size=64, parts=2, reading=Reading(Share(0, 3)))
