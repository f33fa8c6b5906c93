"""Which image files people mean by the names, folders and patterns that they type."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from revit.data.image_files import IMAGE_SUFFIXES, is_image_name, printable
from revit.data.listing import entries
from revit.data.spec import DataError


def find_images(patterns: Sequence[str]) -> list[Path]:
    """The files that names stand for, each once: a file is itself, a folder all images below it, a pattern (`*`, `?`, `**`)
    the images and folders that it matches. Hidden ones are left out. A name that stands for nothing raises `DataError`."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        files = [name] if os.path.isfile(name) else _images_below(name) if os.path.isdir(name) else _images_matching(name)
        if not files:
            raise DataError(f"{printable(pattern)}: {_why_nothing(name)}")
        for file in files:
            found.setdefault(os.path.abspath(file), Path(file))
    return list(found.values())


def _images_below(folder: str) -> list[str]:
    """As in the folders of a dataset, links to other folders are not followed."""
    files: list[str] = []
    for entry in entries(folder):
        if entry.is_dir(follow_symlinks=False):
            files += _images_below(entry.path)
        elif is_image_name(entry.name) and not os.path.isdir(entry.path):
            files.append(entry.path)
    return files


def _images_matching(pattern: str) -> list[str]:
    files: list[str] = []
    fixed = len(Path(pattern.split("**")[0]).parts) if "**" in pattern else None
    for name in sorted(glob.glob(pattern, recursive=True)):
        # `**` goes through links as well, round and round if one leads to a parent; single stars do as they are told.
        if fixed is not None and _passes_link(name, fixed):
            continue
        if os.path.isdir(name):
            files += _images_below(name)
        elif is_image_name(name):
            files.append(name)
    return files


def _passes_link(name: str, start: int) -> bool:
    """Whether one of the folders in a path, after the first few, is a link."""
    parts = Path(name).parts
    folders = (os.path.join(*parts[:i]) for i in range(start + 1, len(parts) + 1))
    return any(os.path.islink(folder) and os.path.isdir(folder) for folder in folders)


def _why_nothing(name: str) -> str:
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    if os.path.isdir(name):
        return f"no images in this folder; their names end in {suffixes}"
    if glob.has_magic(name):
        return f"matches no images; their names end in {suffixes}"
    return "no such file or folder; check the name"
