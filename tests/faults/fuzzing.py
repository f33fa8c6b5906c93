"""7. Fuzzing: whatever bytes a parser gets, it ends in a value or in its named error, soon.

The mutations are our own (`tests.faults.mutation`): nothing to compile, the same on every machine, each named by its number.
`tests.faults.guided` lets atheris, where it is installed, look for more.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from revit.cli.parser import Parser, UsageError
from revit.data.amat import read_amat
from revit.data.arrays import read_npz
from revit.data.manifest import read_manifest
from revit.data.mnist_files import read_idx
from revit.data.spec import DataError
from revit.groups import Group
from revit.training.checkpoint import CheckpointError, read_checkpoint
from revit.training.recipe import Recipe, RecipeError, read_recipe
from tests.faults.cases import number_of, write
from tests.faults.mutation import Target, fuzz
from tests.faults.tally import Tally

RECIPES = (
    b"description: small\nbase: demo\nmodel: {group: p4m, dims: [4, 8], strict: true}\ntrain:\n  lr: 1e-3\n  epochs: 3\n",
    b"data: &d\n  name: folder\n  val_fraction: 0.25\naugment: {rotate: 180, <<: {shift: 1}}\ntrain: {seed: 0x1F, clip: .1}\n",
)
YAML_WORDS = (
    b"base: ", b"base: [1]", b"base: 3", b"? [a]\n: b", b"!!int x", b"!!bool x", b"!!timestamp x", b"!!binary x", b"!!set {a}",
    b"!!python/name:os", b"!!omap [a: 1]", b"!!null x", b"!!float x", b"!!int ''", b"2001-99-99", b"1:99", b"0b", b"&a ", b"*a",
    b"<<: *a", b"<<: 3", b"{", b"[", b"}", b"|\n", b"---\n", b"%YAML 9.9\n", b"\t", b"\xef\xbb\xbf", b"\xff\xfe", b"model: ",
    b"train: ", b": ", b"- ", b".nan",
)  # fmt: skip


def group_names(folder: Path) -> Target:
    """Mutated names of groups: a group whose name gives it back, or ValueError."""

    def parse(data: bytes) -> None:
        group = Group.parse(data.decode("utf-8", "surrogateescape"))
        assert Group.parse(group.name) == group and 1 <= group.order <= 256

    names = (b"z2", b"z2m", b"p4", b"p4m", b"C8", b"D_4", b" p12m ", b"p256", b"p128m", b"d2")
    words = (b"p", b"m", b"c_", b"0", b"00", b"\xc2\xb2", b"\xd9\xa4", b"\xe2\x91\xa3", b"\xc4\xb0", b"\xc5\xbf", b"\n", b" ")
    return Target(parse, ValueError, names, words)


def recipes(folder: Path) -> Target:
    """Mutated YAML recipes: sections of options, or RecipeError."""
    path = folder / "mutant.yaml"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        values = read_recipe(path)
        assert all(isinstance(section, dict) for section in values.values())

    return Target(parse, RecipeError, RECIPES, YAML_WORDS)


def typed_recipes(folder: Path) -> Target:
    """Mutated recipes all the way to typed options: a recipe whose YAML is read again, or a named error."""
    path = folder / "mutant.yaml"
    parser = Parser("train", "RECIPE", "")
    parser.add_argument("recipe", type=str)
    parser.add_recipe_options()

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        _, recipe = parser.read_recipe_options(str(path), [str(path)])
        assert isinstance(recipe, Recipe)
        path.write_text(recipe.to_yaml())
        assert read_recipe(path) == recipe.to_dict()

    return Target(parse, (RecipeError, UsageError, DataError), RECIPES, YAML_WORDS)


def amat(folder: Path) -> Target:
    """Mutated amat files of two digits: images and labels, or DataError."""

    def parse(data: bytes) -> None:
        images, labels = read_amat(io.BytesIO(data), "some.amat", 2)
        assert images.shape == (2, 28, 28) and labels.max() <= 9

    lines = (b"0 .5 1 1 " * 196 + b"%d\n" % label for label in (3, 9))
    words = (
        b"nan",
        b"inf",
        b"-0.0",
        b"1e-400",
        b"0x1p-1",
        b"1_0",
        b"#",
        b"\n",
        b"\r",
        b"\xd9\xa1",
        b" 10\n",
        b"1.0000001",
        b"e",
        b"\x00",
        b"i",
    )
    return Target(parse, DataError, [b"".join(lines)], words, "some.amat")


def idx(folder: Path) -> Target:
    """Mutated idx files, gzipped and plain: an array of the size of the file, or DataError."""
    path = folder / "mutant-idx3-ubyte"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        assert read_idx(path, 3).dtype == np.uint8

    plain = bytes((0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 3)) + bytes(range(24))
    packed = gzip.compress(plain, mtime=0)
    words = (
        b"\x1f\x8b\x08",
        b"\x00\x00\x08\x03",
        b"\x00\x00\x08\x01",
        b"\xff\xff\xff\xff",
        b"\x80\x00\x00\x00",
        b"\x00\x00\x00\x00",
    )
    return Target(parse, DataError, (plain, packed), words, path.name)


def npz(folder: Path) -> Target:
    """Mutated .npz files: checked images and labels, or DataError."""
    path = folder / "mutant.npz"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        for images, labels in read_npz(path).parts.values():
            assert images.dtype == np.uint8 and images.ndim == 4 and labels.shape == (len(images),)

    pixels, labels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3), np.arange(2)
    arrays = {"train_images": pixels, "train_labels": labels, "test_images": pixels, "test_labels": labels}
    samples = []
    for save, more in ((np.savez, {}), (np.savez_compressed, {"classes": np.array(["cat", "dog"])})):
        buffer = io.BytesIO()
        save(buffer, **arrays, **more)
        samples.append(buffer.getvalue())
    words = (
        b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x03\x00",
        b"'descr': '|O'", b"'|V9'", b"'<M8[ns]'", b"'<U99999999'", b"'fortran_order': 1", b"(2L, 3)", b"()", b"(-1,)",
        b"(1e9,)", b"[('a', '|u1')]", b"((((((((", b"\\", b"\x0c\x00", b"\x0e\x00", b"\x5d\x00", b"\x01\x00",
    )  # fmt: skip
    return Target(parse, DataError, samples, words, path.name)


def csv_manifests(folder: Path) -> Target:
    """Mutated CSV tables of images: paths below the root with labels, or DataError."""
    path = folder / "mutant.csv"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        listing = read_manifest(path, folder)
        assert len(listing.paths) == len(listing.labels) == len(listing.parts) > 0
        assert all(os.path.commonpath([name, folder]) == str(folder) for name in listing.paths)

    samples = (
        b"path,label\na/1.png,cat\nb/2.png,dog\n",
        b'split,path,label\ntrain,"a,1.png",cat\r\ntest,./2.png,dog\nval,3.png,cat\ntrain,b/../4.png,dog\n',
    )
    words = (
        b"../",
        b"/etc/passwd",
        b'"',
        b'""',
        b",",
        b"\n",
        b"\r",
        b"\x00",
        b"\xef\xbb\xbf",
        b"~",
        b"//",
        b".",
        b"train",
        b"\xff",
    )
    return Target(parse, DataError, samples, words, path.name)


def checkpoint_manifests(folder: Path) -> Target:
    """Mutated manifests of a checkpoint: the one whole checkpoint that was written, or CheckpointError."""
    place = folder / "last"
    write(place, 7)

    def parse(data: bytes) -> None:
        (place / "manifest.json").write_bytes(data)
        assert number_of(read_checkpoint(place)) == 7

    whole = (place / "manifest.json").read_bytes()
    words = (
        b"{", b"}", b"[", b'"', b"null", b"true", b"NaN", b"-Infinity", b"1e400", b'"format": 1,', b'"format": 2,',
        b'"format": 1.0,', b"\\ud800", b'"../model.safetensors": ', b'"/etc/passwd": ', b'"sha256": ', b"[" * 3000,
        b'{"a":' * 3000, b"\xef\xbb\xbf", b"\x00", b"\xff\xfe",
    )  # fmt: skip
    return Target(parse, CheckpointError, (whole, json.dumps(json.loads(whole)).encode()), words, str(place))


def mutations(target: Callable[[Path], Target]) -> Callable[[Path, int, int], Tally]:
    """The scenario of a parser."""

    def scenario(folder: Path, count: int, seed: int) -> Tally:
        return fuzz(target(folder), count, seed)

    scenario.__doc__ = target.__doc__
    return scenario
