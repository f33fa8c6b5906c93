"""Files that grow: written as `<name>.partial`, which takes its name when it is complete and stays for a look otherwise."""

from __future__ import annotations

import csv
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from revit.data.image_files import printable
from revit.data.spec import DataError

CSV_LINE_END = "\r\n"


@contextmanager
def growing_file(path: Path, mode: str, **options: Any) -> Iterator[IO[Any]]:
    """A file for writing that replaces an older one of this name only when the block has ended well."""
    if path.is_dir():
        raise DataError(f"{printable(path)}: a folder; name the file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, mode, **options) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextmanager
def growing_csv(path: Path, header: Sequence[str]) -> Iterator[Callable[[Sequence[str]], object]]:
    """Gives the function that adds a row. File names that are not UTF-8 keep their bytes."""
    with growing_file(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(_Lines(file))
        writer.writerow(header)
        yield writer.writerow


class _Lines:
    """Ends rows with a line feed. The csv module only quotes the characters of its own line end; as names of files may hold a
    carriage return too, it must write both, and one is taken away here."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, line: str) -> int:
        return self.file.write(f"{line.removesuffix(CSV_LINE_END)}\n")


@contextmanager
def growing_npy(path: Path) -> Iterator[Callable[[Tensor], None]]:
    """Gives the function that adds rows [B, C] to a float32 array [N, C]. However the block ends, the header counts them."""
    shape = [0, 0]
    with growing_file(path, "wb") as file:

        def add(rows: Tensor) -> None:
            file.write(rows.detach().float().cpu().numpy().astype("<f4").tobytes())
            shape[0] += rows.shape[0]
            shape[1] = rows.shape[1]

        file.write(_npy_header(0, 0))
        try:
            yield add
        finally:
            file.seek(0)
            file.write(_npy_header(*shape))


def _npy_header(count: int, width: int) -> bytes:
    """128 bytes for any shape, so that it can be written again when the number of rows is known."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {width}), }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + f"{text:<117}\n".encode()
