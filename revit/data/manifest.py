"""The images of a folder as a table: a CSV file with the columns path, label and, if the parts are given, split."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TextIO

from revit.data.image_files import printable
from revit.data.listing import PARTS, Listing
from revit.data.spec import DataError

_COLUMNS = ("path", "label", "split")


def read_manifest(file: Path, root: Path) -> Listing:
    """The images that a CSV file lists.

    Paths are relative to the folder of the CSV file or, if that lies elsewhere, to the root. All images lie below the root.
    """
    try:
        with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            return _read(lines, file, root)
    except OSError as error:
        raise DataError(
            f"{printable(file)}: cannot be read ({error.strerror}); file names a CSV file below the root"
        ) from error


def _read(lines: TextIO, file: Path, root: Path) -> Listing:
    rows = csv.reader(lines, strict=True)
    shown, above = printable(file), os.path.abspath(root)
    base = os.path.dirname(os.path.abspath(file))
    if not _lies_below(base, above):
        base = above
    listing, seen = Listing([], [], []), dict[str, int]()
    columns: list[str] = []
    try:
        for row in rows:
            line = f"{shown}, line {rows.line_num}"
            if not row:
                continue
            if not columns:
                columns = _columns(row, line)
                continue
            if len(row) != len(columns):
                raise DataError(f"{line}: {len(row)} fields where the header has {len(columns)}; quote fields with commas")
            fields = dict(zip(columns, (field.strip() for field in row), strict=True))
            path = _path(fields["path"], base, above, line)
            if path in seen:
                raise DataError(f"{line}: {printable(fields['path'])} is already in line {seen[path]}; keep one of them")
            if not fields["label"]:
                raise DataError(f"{line}: no label; write the name of the class")
            seen[path] = rows.line_num
            listing.paths.append(path)
            listing.labels.append(fields["label"])
            listing.parts.append(_part(fields["split"], line) if "split" in fields else "")
    except csv.Error as error:
        raise DataError(f"{shown}, line {rows.line_num}: not CSV ({error}); mend the line") from error
    _check(listing, shown)
    return listing


def _columns(row: list[str], line: str) -> list[str]:
    columns = [name.strip().lower() for name in row]
    for name in _COLUMNS[:2]:
        if name not in columns:
            raise DataError(
                f"{line}: no column {name} among {printable(', '.join(columns))}; the first line is path,label,split"
            )
    if len(set(columns)) != len(columns):
        raise DataError(f"{line}: two columns have one name: {printable(', '.join(columns))}; rename one")
    return columns


def _lies_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _path(text: str, base: str, root: str, line: str) -> str:
    if not text:
        raise DataError(f"{line}: no path; write where the image lies")
    path = os.path.normpath(os.path.join(base, text))
    if not _lies_below(path, root):
        raise DataError(f"{line}: {printable(text)} lies outside of {printable(root)}; list images below the root only")
    return path


def _part(text: str, line: str) -> str:
    if text.lower() not in PARTS:
        raise DataError(f"{line}: split is {printable(text) or 'empty'}; write train, val or test")
    return PARTS[text.lower()]


def _check(listing: Listing, shown: str) -> None:
    if not listing.paths:
        raise DataError(f"{shown}: lists no images; below the header path,label write a line for each")
    if len(listing.classes) < 2:
        raise DataError(f"{shown}: one class only, {printable(listing.classes[0])}; classification needs at least two")
    if listing.parts[0] == "":
        return
    trained = {label for label, part in zip(listing.labels, listing.parts, strict=True) if part == "train"}
    if not trained:
        raise DataError(f"{shown}: no image is for train; write train into the column split of most lines")
    for label, part in zip(listing.labels, listing.parts, strict=True):
        if label not in trained:
            raise DataError(f"{shown}: class {printable(label)} is in {part} but not in train; a model cannot learn it")
