"""Rotated MNIST (Larochelle et al. 2007): the official archive, or the same rebuilt from MNIST by their protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from revit.data.amat import read_amat
from revit.data.archives import naming, open_zip_member
from revit.data.arrays import ArrayImages, named_file
from revit.data.cache import fingerprint
from revit.data.digits import digit_spec, random_angles
from revit.data.download import MNIST, ROTMNIST, checksum, dataset_folder, fetch
from revit.data.mnist_files import FOLDERS, IDX_NAMES, Mnist, find_mnist, read_mnist_idx, read_mnist_npz
from revit.data.npz import file_identity, keep_arrays, load_arrays
from revit.data.randomness import permutation
from revit.data.registry import register_dataset
from revit.data.rotation import turn_digits
from revit.data.spec import DataError, DataOptions, Dataset

SEED = 0
PROTOCOL = 1  # raised with every change of what `rebuild` gives, so that no old result is taken from the cache
TRAIN_AMAT = "mnist_all_rotation_normalized_float_train_valid.amat"
TEST_AMAT = "mnist_all_rotation_normalized_float_test.amat"
OFFICIAL_FOLDERS = (".", "mnist_rotation_new", "rotmnist")
MAX_BYTES = 2 * 2**30  # of text: 62,000 lines of 34,000 characters

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Sizes:
    """How many digits each part has, and MNIST itself."""

    train: int = 10_000
    val: int = 2_000
    test: int = 50_000
    mnist_train: int = 60_000
    mnist_test: int = 10_000

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], type[np.uint8]]]:
        """Of the arrays that hold the dataset: training and validation digits in one, as in the official files."""
        shapes: dict[str, tuple[tuple[int, ...], type[np.uint8]]] = {}
        for part, count in (("train", self.train + self.val), ("test", self.test)):
            shapes |= {f"{part}_images": ((count, 28, 28), np.uint8), f"{part}_labels": ((count,), np.uint8)}
        return shapes


SIZES = Sizes()


@register_dataset("rotmnist")
def open_rotmnist(options: DataOptions) -> Dataset:
    """Rotated MNIST: 10,000 / 2,000 / 50,000 digits turned by any angle (official archive, or rebuilt from MNIST)."""
    folder = dataset_folder(options)
    if options.file is not None:
        arrays, source = _from_named_file(folder, options)
    else:
        arrays, source = _from_folder(folder, options)
    images, labels = arrays["train_images"][:, None], arrays["train_labels"]  # [N, 1, 28, 28]
    train = ArrayImages(images[: SIZES.train], labels[: SIZES.train], "rotmnist/train")
    val = ArrayImages(images[SIZES.train :], labels[SIZES.train :], "rotmnist/val")
    test = ArrayImages(arrays["test_images"][:, None], arrays["test_labels"], "rotmnist/test")
    return Dataset(digit_spec("rotmnist", source), train, val, test)


def _from_folder(folder: Path, options: DataOptions) -> tuple[Arrays, str]:
    official = find_official(folder)
    if not official and options.download:
        try:
            official = (fetch(ROTMNIST, folder),)
        except DataError as error:
            raise DataError(f"{error}; or rebuild it from MNIST: add --data.file {MNIST[0].name}") from error
    if official:
        return read_official(official), "official archive" + (", unpacked" if len(official) == 2 else "")
    mnist = find_mnist(folder)
    if mnist is None:
        raise DataError(
            f"{folder}: no rotated MNIST. Looked for {ROTMNIST.name}, {TRAIN_AMAT} and {TEST_AMAT} (here and in"
            f" {', '.join(OFFICIAL_FOLDERS[1:])}), and for mnist.npz or {IDX_NAMES[0]} and the other three (here and in"
            f" {', '.join(FOLDERS[1:])}). Three ways: add --data.download true; put {ROTMNIST.url} here;"
            f" or put MNIST here, from {MNIST[0].url.rpartition('/')[0]}, to rebuild it"
        )
    return _rebuilt(mnist)


def _from_named_file(folder: Path, options: DataOptions) -> tuple[Arrays, str]:
    """An official archive under another name, or the file of MNIST to rebuild from even if the archive is there as well."""
    wanted = folder / str(options.file)
    if "idx3-ubyte" in wanted.name:
        if options.download and not wanted.exists():
            for remote in MNIST:
                fetch(remote, wanted.parent)
        return _rebuilt(read_mnist_idx(wanted.parent))
    path = named_file(options, folder)
    assert path is not None
    if path.suffix == ".zip":
        return read_official((path,)), "official archive"
    if path.suffix == ".npz":
        return _rebuilt(read_mnist_npz(path))
    raise DataError(f"{path}: rotmnist is read from {ROTMNIST.name}, or rebuilt from mnist.npz or {MNIST[0].name}")


def find_official(folder: Path) -> tuple[Path, ...]:
    """The archive, or its two files unpacked, or nothing."""
    for place in (folder / name for name in OFFICIAL_FOLDERS):
        if (place / ROTMNIST.name).is_file():
            return (place / ROTMNIST.name,)
        unpacked = place / TRAIN_AMAT, place / TEST_AMAT
        present = [path.is_file() for path in unpacked]
        if all(present):
            return unpacked
        if any(present):
            raise DataError(
                f"{unpacked[present.index(False)]}: no such file, but the other half of rotated MNIST is there; add it"
            )
    return ()


def read_official(paths: tuple[Path, ...]) -> Arrays:
    """Digits from the archive (one path, its checksum is checked) or its two files (train, test). Parsed once, then kept."""
    name = f"rotmnist-official-{fingerprint([file_identity(path) for path in paths])}.npz"
    arrays = load_arrays(name, SIZES.shapes)
    if arrays is None:
        if len(paths) == 1:
            with naming(paths[0]):
                found = checksum(paths[0])
            if found != ROTMNIST.md5:
                raise DataError(
                    f"{paths[0]}: MD5 {found} instead of {ROTMNIST.md5}: damaged, or another file; get {ROTMNIST.url}"
                )
        arrays = {}
        train = ("train", TRAIN_AMAT, paths[0], SIZES.train + SIZES.val)
        for part, member, path, rows in (train, ("test", TEST_AMAT, paths[-1], SIZES.test)):
            with _lines(path, member) as (stream, where):
                arrays[f"{part}_images"], arrays[f"{part}_labels"] = read_amat(stream, where, rows)
        keep_arrays(name, arrays)
    return arrays


@contextmanager
def _lines(path: Path, member: str) -> Iterator[tuple[IO[bytes], str]]:
    if path.suffix == ".zip":
        with open_zip_member(path, member, MAX_BYTES) as stream:
            yield stream, f"{path}: {member}"
    else:
        with naming(path), open(path, "rb") as stream:
            yield stream, str(path)


def _rebuilt(mnist: Mnist) -> tuple[Arrays, str]:
    digest = hashlib.sha256()
    for array in (mnist.train_images, mnist.train_labels, mnist.test_images, mnist.test_labels):
        digest.update(np.ascontiguousarray(array).data)
    name = f"rotmnist-rebuilt-{fingerprint(digest.hexdigest(), SEED, PROTOCOL)}.npz"
    arrays = load_arrays(name, SIZES.shapes)
    if arrays is None:
        arrays = rebuild(mnist, SEED, SIZES)
        keep_arrays(name, arrays)
    return arrays, f"rebuilt from {mnist.source} by the protocol of Larochelle et al. 2007, seed {SEED}"


def rebuild(mnist: Mnist, seed: int, sizes: Sizes) -> Arrays:
    """Rotated MNIST from MNIST: 62,000 of its digits, each turned by its own uniform angle.

    Training and validation digits are drawn from MNIST's training digits; all of MNIST's test digits are test digits, and the
    rest of the test is drawn from the training digits that were left. No digit is used twice.
    """
    if (len(mnist.train_images), len(mnist.test_images)) != (sizes.mnist_train, sizes.mnist_test):
        raise DataError(
            f"{mnist.source}: {len(mnist.train_images):,} and {len(mnist.test_images):,} digits instead of MNIST's"
            f" {sizes.mnist_train:,} and {sizes.mnist_test:,}; rotated MNIST needs all of them"
        )
    order = permutation(sizes.mnist_train, seed, "rotmnist")
    first, last = sizes.train + sizes.val, sizes.train + sizes.val + sizes.test - sizes.mnist_test
    shuffled = permutation(sizes.test, seed, "rotmnist test")  # so that MNIST's two sources are mixed in every stretch of it
    images = {
        "train": mnist.train_images[order[:first]],
        "test": np.concatenate((mnist.train_images[order[first:last]], mnist.test_images))[shuffled],
    }
    labels = {
        "train": mnist.train_labels[order[:first]],
        "test": np.concatenate((mnist.train_labels[order[first:last]], mnist.test_labels))[shuffled],
    }
    angles = random_angles(first + sizes.test, seed)
    turned = {"train": turn_digits(images["train"], angles[:first]), "test": turn_digits(images["test"], angles[first:])}
    return {f"{part}_images": turned[part] for part in turned} | {f"{part}_labels": labels[part] for part in labels}
