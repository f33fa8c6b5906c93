"""A sample of ImageNet in one file, one photo a class: for questions about large images that need no million of them.

With one photo a class nothing can be learnt about the classes, so they are joined to ten groups of a hundred neighbours in
ImageNet's order (fish and birds, ..., dogs, ..., things): real photos of the real size with a task that can be trained.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revit.data.file_images import Fit
from revit.data.imagenet import MEAN, SIZE, STD
from revit.data.npz import read_arrays
from revit.data.registry import data_root, register_dataset
from revit.data.spec import Crop, DataError, DataOptions, Dataset, DataSpec, Images, Pixels, stratified_split
from revit.data.unlabelled import open_images

FILE = "imagenet_sample_224_1000_jpeg.npz"
GROUP = 100


class PickedImages:
    """Some of the images of another split, with labels of their own."""

    def __init__(self, images: Images, numbers: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        self.images, self.numbers, self.labels = images, numbers, labels

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.images.name(int(self.numbers[index]))

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        return self.images.read(int(self.numbers[index]), crop)


def photo_file(options: DataOptions) -> Path:
    """The file with the photos, if it is where the options say."""
    path = data_root(options) / (options.file or FILE)
    if not path.is_file():
        raise DataError(f"{path}: not there; name the folder that holds it with --data-root")
    return path


@register_dataset("photos")
def open_photos(options: DataOptions) -> Dataset:
    """1,000 photos of 224 x 224 pixels in ten groups of classes; 70 % train, 10 % validation, 20 % test, group by group."""
    path = photo_file(options)
    side = SIZE if options.size is None else options.size
    images = open_images([str(path)], Fit(3, (side, side)))
    given = read_arrays(path, ("labels",)).get("labels")
    if given is None or given.shape != (len(images),) or given.dtype.kind not in "iu" or given.min() < 0:
        raise DataError(f"{path}: labels must be {len(images)} whole numbers from 0; store them with the images")
    labels = given.astype(np.int64) // GROUP
    groups = np.unique(labels)
    if len(groups) < 2:
        raise DataError(f"{path}: all labels fall into one group of {GROUP}; at least two are needed")
    labels = np.searchsorted(groups, labels)
    rest, test = stratified_split(labels, options.test_fraction, options.split_seed)
    kept, held = stratified_split(labels[rest], options.val_fraction / (1 - options.test_fraction), options.split_seed + 1)
    spec = DataSpec(
        name="photos",
        channels=3,
        size=(side, side),
        classes=tuple(f"classes {GROUP * group} to {GROUP * group + GROUP - 1}" for group in groups),
        mean=MEAN,
        std=STD,
        source=f"{len(images):,} photos of {path.name}, labels in groups of {GROUP}, split by seed {options.split_seed}",
    )
    parts = [PickedImages(images, numbers, labels[numbers]) for numbers in (rest[kept], rest[held], test)]
    return Dataset(spec, *parts)
