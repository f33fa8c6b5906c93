"""The text files of Larochelle et al. 2007: a digit a line, 784 numbers between 0 and 1 and then its label."""

from __future__ import annotations

from typing import IO

import numpy as np
from numpy.typing import NDArray

from revit.data.spec import DataError

SIDE = 28
MAX_LINE = 64 * 1024  # bytes: 785 numbers of 80 characters
_AGAIN = "download the archive again"


def read_amat(stream: IO[bytes], name: str, rows: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [rows, 28, 28] and labels [rows] from a stream of lines. `name` is what errors call it."""
    images, labels = np.empty((rows, SIDE * SIDE), np.uint8), np.empty(rows, np.uint8)
    row = number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if not line.strip() or line.startswith(b"#"):
            continue
        if row == rows:
            raise DataError(f"{name}, line {number}: more than the {rows:,} digits of the official file; {_AGAIN}")
        values = _numbers(line, f"{name}, line {number}")
        # As the released code does: times 256 and rounded. 1.0 would overflow there, here it is white.
        images[row] = np.minimum(np.round(values[:-1] * 256), 255)
        labels[row] = values[-1]
        row += 1
    if row != rows:
        raise DataError(f"{name}: {row:,} digits instead of the {rows:,} of the official file; {_AGAIN}")
    # Row after row, as gconv_experiments (Cohen and Welling 2016), escnn and skdata read this archive; skdata transposes
    # other variations of MNIST by the same authors, not this one.
    return images.reshape(rows, SIDE, SIDE), labels


def _numbers(line: bytes, where: str) -> NDArray[np.float64]:
    tokens = line.split()
    if len(tokens) != SIDE * SIDE + 1:
        raise DataError(f"{where}: {len(tokens)} numbers instead of {SIDE * SIDE + 1}; {_AGAIN}")
    try:
        values = np.array(tokens, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{where}: {error}; {_AGAIN}") from error
    pixels, label = values[:-1], values[-1]
    if not (pixels.min() >= 0 and pixels.max() <= 1):  # false for NaN as well
        wrong = next(token for token, value in zip(tokens, pixels, strict=False) if not 0 <= value <= 1)
        raise DataError(f"{where}: pixel value {wrong.decode()} is not between 0 and 1; {_AGAIN}")
    if label not in range(10):
        raise DataError(f"{where}: label {label:g} is not a digit from 0 to 9; {_AGAIN}")
    return values
