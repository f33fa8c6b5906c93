"""Which images a folder holds, of which class, and for which part of the work."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from revit.data.image_files import is_image_name, printable
from revit.data.spec import DataError

PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Names of the parts, as folders and manifests write them, and as we do."""

LAYOUTS = (
    "give each class a folder (ROOT/cat/1.png, ROOT/dog/2.png), if you like below train, val and test"
    " (ROOT/train/cat/1.png), or write a CSV file with the columns path and label and name it with file"
)


@dataclass(frozen=True)
class Listing:
    """Files with the class and the part of each. A part is "" where nothing says which."""

    paths: list[str]
    labels: list[str]
    parts: list[str]

    @property
    def classes(self) -> list[str]:
        return sorted(set(self.labels), key=natural)


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sorts names as people do: class2 before class10."""
    pieces = re.split(r"(\d{1,4000})", name)  # Python reads no more digits as a number
    return tuple(int(piece) if i % 2 else piece.casefold() for i, piece in enumerate(pieces)), name


def list_folder(root: Path) -> Listing:
    """The images of a folder of class folders, or of such folders for train, val and test."""
    listing = Listing([], [], [])
    classes: dict[str, list[str]] = {}
    for part, folder in _part_folders(root).items():
        classes[part] = _subfolders(folder)
        _check_classes(folder, classes[part], classes.get("train"))
        for name in classes[part]:
            paths = _images_of_class(os.path.join(folder, name), root)
            listing.paths.extend(paths)
            listing.labels.extend([name] * len(paths))
            listing.parts.extend([part] * len(paths))
    return listing


def entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What a folder holds and is not hidden, by name."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror}); try chmod u+rx on it") from error


def _subfolders(folder: str | Path) -> list[str]:
    # os.path.isdir, because a link to itself makes DirEntry.is_dir raise
    return sorted((entry.name for entry in entries(folder) if os.path.isdir(entry.path)), key=natural)


def _holds_images(folder: str | Path) -> bool:
    return any(is_image_name(entry.name) and not os.path.isdir(entry.path) for entry in entries(folder))


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each part, train first; or the root itself for "" if its folders are classes.

    A class may be called train or test, as trains and tests are. It holds images where a part holds folders.
    """
    found = _subfolders(root)
    if not found:
        images = "holds images, but no folders of classes" if _holds_images(root) else "holds no images"
        raise DataError(f"{printable(root)}: {images}; {LAYOUTS}")
    named = [name for name in found if name.lower() in PARTS]
    train = [name for name in named if name.lower() == "train"]
    if not (train and _subfolders(root / train[0]) and not _holds_images(root / train[0])):
        if len(named) == len(found):
            missing = f"{train[0]}/ has no folders of classes" if train else f"has {', '.join(named)} but no train"
            raise DataError(f"{printable(root)}: {missing}; {LAYOUTS}")
        return {"": root}
    twice = [part for part, count in Counter(PARTS[name.lower()] for name in named).items() if count > 1]
    if twice:
        both = ", ".join(name for name in named if PARTS[name.lower()] in twice)
        raise DataError(f"{printable(root)}: {both} would be the same part; keep one of them")
    folders = {PARTS[name.lower()]: root / name for name in named}
    return {part: folders[part] for part in ("train", "val", "test") if part in folders}


def _check_classes(folder: Path, classes: list[str], expected: list[str] | None) -> None:
    if expected is not None and classes != expected:
        missing, extra = [c for c in expected if c not in classes], [c for c in classes if c not in expected]
        difference = [f"lacks {_names(missing)}"] * bool(missing) + [f"has {_names(extra)} besides"] * bool(extra)
        raise DataError(
            f"{printable(folder)}: its classes are not those of train: it {' and '.join(difference)}; make them equal"
        )
    if len(classes) < 2:
        raise DataError(f"{printable(folder)}: one class only, {_names(classes)}; classification needs at least two. {LAYOUTS}")


def _names(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _images_of_class(folder: str, root: Path) -> list[str]:
    real_root = os.path.realpath(root)
    if os.path.commonpath([real_root, os.path.realpath(folder)]) == os.path.realpath(folder):
        raise DataError(f"{printable(folder)}: a link back to the folder that holds it; remove the link")
    paths, others = [], 0
    for path in _files_below(folder):
        if is_image_name(path):
            paths.append(path)
        else:
            others += 1
    if not paths:
        reason = f"{others} files, but no image by its name" if others else "no files"
        raise DataError(f"{printable(folder)}: a class without images ({reason}); add images or remove the folder")
    return paths


def _files_below(folder: str) -> Iterator[str]:
    """All files, folder by folder. Links to folders are not followed: they may lead round in circles, or to other classes."""
    for entry in entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path)
        elif not (entry.is_symlink() and os.path.isdir(entry.path)):
            yield entry.path
