"""The text format of the official archive."""

import io

import numpy as np
import pytest

from revit.data import amat
from revit.data.amat import read_amat


def text(values, labels):
    """Lines as in the archive: 784 numbers and the label."""
    buffer = io.BytesIO()
    np.savetxt(buffer, np.column_stack((values, labels)), fmt="%.7e", delimiter=" ")
    return buffer.getvalue()


VALUES = np.random.default_rng(0).integers(0, 256, (4, 784)) / 256
LABELS = np.array([0, 9, 3, 3])


def read(data, rows=4):
    return read_amat(io.BytesIO(data), "some.amat", rows)


def test_rows_are_images():
    images, labels = read(text(VALUES, LABELS))
    assert images.dtype == np.uint8 and labels.tolist() == [0, 9, 3, 3]
    for y in (0, 5, 27):
        np.testing.assert_array_equal(images[:, y], VALUES[:, 28 * y : 28 * y + 28] * 256)  # row after row


def test_times_256_and_rounded():
    values = np.zeros((1, 784))
    values[0, :5] = 0.4 / 256, 0.6 / 256, 254.6 / 256, 255.9 / 256, 1.0
    assert read(text(values, [1]), 1)[0].flatten()[:6].tolist() == [0, 1, 255, 255, 255, 0]


def test_blank_lines_comments_and_other_spaces():
    data = b"# size\n\n" + text(VALUES, LABELS).replace(b" ", b"\t  ").replace(b"\n", b"\r\n") + b"\n \n"
    np.testing.assert_array_equal(read(data)[0], read(text(VALUES, LABELS))[0])
    np.testing.assert_array_equal(
        read(text(VALUES, LABELS)[:-1])[0], read(text(VALUES, LABELS))[0]
    )  # no end of line at the end


def third_line(change):
    lines = text(VALUES, LABELS).splitlines(keepends=True)
    lines[2] = change(lines[2])
    return b"".join(lines)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line[:100] + b"\n", ["line 3", "instead of 785"]),
        (lambda line: b"0 " + line, ["line 3", "786 numbers instead of 785"]),
        (lambda line: b"zero" + line[line.index(b" ") :], ["line 3", "zero"]),
        (lambda line: b"nan" + line[line.index(b" ") :], ["line 3", "pixel value nan is not between 0 and 1"]),
        (lambda line: b"inf" + line[line.index(b" ") :], ["line 3", "pixel value inf"]),
        (lambda line: b"1.01" + line[line.index(b" ") :], ["line 3", "pixel value 1.01"]),
        (lambda line: b"-1e-3" + line[line.index(b" ") :], ["line 3", "pixel value -1e-3"]),
        (lambda line: line[: line.rindex(b" ")] + b" 10\n", ["line 3", "label 10 is not a digit"]),
        (lambda line: line[: line.rindex(b" ")] + b" -1\n", ["line 3", "label -1"]),
        (lambda line: line[: line.rindex(b" ")] + b" 2.5\n", ["line 3", "label 2.5"]),
        (lambda line: line[: line.rindex(b" ")] + b" nan\n", ["line 3", "label nan"]),
        (lambda line: b"\xff\xfe" + line, ["line 3"]),
        (lambda line: line + line, ["line 5", "more than the 4 digits"]),
        (lambda line: b"", ["3 digits instead of the 4 of the official file"]),
    ],
    ids=["short", "long", "text", "nan", "inf", "large", "negative", "10", "-1", "2.5", "nan label", "bytes", "more", "fewer"],
)
def test_the_wrong_line_is_named(refused, change, words):
    with refused("some.amat", "download the archive again", *words):
        read(third_line(change))


def test_endless_line(refused, monkeypatch):
    monkeypatch.setattr(amat, "MAX_LINE", 1000)
    with refused("some.amat", "line 1", "instead of 785"):
        read(b"0 " * 10**6)
