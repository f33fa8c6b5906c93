"""The batches of CIFAR-10: binary records, and Python pickles that are read without running anything in them.

A pickle is a program: loading one calls whatever functions it names. The batches name five, all from numpy, to rebuild one
array. Here these names stand for objects that only write down what they were given, every other name is an error, and the array
is then made from the bytes that were written down.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revit.data.spec import DataError

RECORD = 3072  # values of one image: 1,024 red, 1,024 green, 1,024 blue
Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images [N, 3, 32, 32] and labels [N]."""

_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def read_binary(data: bytes, where: str, records: int) -> Batch:
    """A binary batch: for each image one byte of label and 3,072 of pixels."""
    if len(data) != records * (1 + RECORD):
        raise DataError(
            f"{where}: {len(data):,} bytes instead of {records * (1 + RECORD):,} ({records:,} records); download it again"
        )
    table = np.frombuffer(data, np.uint8).reshape(records, 1 + RECORD)
    return _checked(table[:, 1:], table[:, 0], where, records)


def read_pickled(data: bytes, where: str, records: int) -> Batch:
    """A Python batch: a dictionary with `data` [N, 3072] and `labels`, pickled by Python 2 or 3."""
    try:
        _check_memo(data, where)
        content = _Reader(io.BytesIO(data), where).load()
    except DataError:
        raise
    except Exception as error:  # a broken pickle can raise anything, and none of it is ours
        raise DataError(f"{where}: not a batch of CIFAR-10 ({type(error).__name__}); download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{where}: not a batch of CIFAR-10, which is a dictionary; download it again")
    # Python 2 strings arrive as bytes, Python 3 strings as str.
    values = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    labels = values.get("labels")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{where}: labels must be a list of whole numbers 0 to 9; download it again")
    return _checked(_array(values.get("data"), where), np.array(labels, np.uint8), where, records)


def _checked(pixels: NDArray[np.uint8], labels: NDArray[np.uint8], where: str, records: int) -> Batch:
    if pixels.shape != (records, RECORD) or labels.shape != (records,):
        raise DataError(
            f"{where}: {len(pixels):,} images and {len(labels):,} labels, a batch has {records:,} of each; download it again"
        )
    if labels.max() > 9:
        raise DataError(f"{where}: label {labels.max()} is not one of the classes 0 to 9; download it again")
    return pixels.reshape(-1, 3, 32, 32), labels


class _Recorded:
    """An array or a type under reconstruction: what it was called with, and the state it was given."""

    __slots__ = ("arguments", "state")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """Stands for a name of numpy in a pickle. Without `__dict__`, so that a pickle cannot change it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "encode":  # how Python 3 writes bytes for Python 2
            text, encoding = arguments
            return str.encode(text, {"latin1": "latin1"}[_text(encoding)])
        return _Recorded(arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise DataError(
                f"{self.where}: asks for {module!r}.{name!r}, which no batch of CIFAR-10 does; do not use this file"
            )
        return _Name(name)


def _check_memo(data: bytes, where: str) -> None:
    """Unpickling makes room for the largest number that an object is stored under: it must not exceed the file's own size."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _PUTS and isinstance(argument, int) and argument > len(data):
            raise DataError(f"{where}: not a batch of CIFAR-10 (a memo of {argument:,} entries); download it again")


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _array(recorded: Any, where: str) -> NDArray[np.uint8]:
    """The array from its recorded state (version, shape, type, column order, bytes)."""
    try:
        _, (rows, columns), kind, by_columns, raw = recorded.state
        if _text(kind.arguments[0]) not in ("u1", "|u1") or by_columns or not isinstance(raw, bytes):
            raise ValueError
        return np.frombuffer(raw, np.uint8).reshape(rows, columns)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{where}: data must be an array of uint8 with a row for each image; download it again") from error
