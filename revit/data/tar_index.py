"""Where the images of a tar archive lie, so that each can be read by itself and nothing is ever unpacked.

An archive follows the usage of webdataset: files whose names are equal up to the first dot of the last part are one sample and
lie together. `cat/0001.jpg` and `cat/0001.cls` are an image and its label.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from revit.data.archives import check_member_name
from revit.data.cache import fingerprint, keep_cached, load_cached
from revit.data.image_files import IMAGE_SUFFIXES, Refused, printable
from revit.data.spec import DataError

BLOCK = tarfile.BLOCKSIZE
MAX_SAMPLES = 1_000_000
MAX_NAME = MAX_JSON = 1 << 20
MAX_CLS = 4096
_VERSION = 1  # of what is kept; a change of the rules below raises it
_MAGIC = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_LONG = {tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE}  # they tell the name of the next member
_PASSED_OVER = {tarfile.DIRTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK}


@dataclass(frozen=True)
class TarIndex:
    """The samples of one archive: names of the images, labels as they are written, first byte and length of each image."""

    path: str
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class _Member(NamedTuple):
    name: str
    start: int
    size: int


def tar_index(path: Path) -> TarIndex:
    """The samples of an archive. They are found once; the result is kept in the cache until the file changes."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            name = f"shards/{fingerprint(_VERSION, str(path.resolve()), found.st_size, found.st_mtime_ns)}.json"
            index = _kept(load_cached(name), path, file.fileno())
            if index is None:
                index = _index(path, file.fileno(), found.st_size)
                keep_cached(name, {key: value for key, value in asdict(index).items() if key != "path"})
            return index
    except Refused as error:
        raise DataError(f"{printable(path)}: {error}") from error
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); check the disk and chmod +r") from error


def holds_member(block: bytes, size: int) -> bool:
    """Whether these 512 bytes are the header of a file of this size."""
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size == size
    except tarfile.HeaderError:
        return False


def _index(path: Path, file: int, length: int) -> TarIndex:
    index, seen = TarIndex(str(path)), set[str]()
    key, parts = "", dict[str, _Member]()
    for member in _members(path, file, length):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if not stem:  # hidden, such as those that macOS adds
            continue
        if f"{folder}/{stem}" != key:
            _add(index, key, parts, file)
            key, parts = f"{folder}/{stem}", {}
            if key in seen:
                raise Refused(f"the files of {_shown(key)} do not lie together; pack them in the order of their names")
            seen.add(key)
        kind = "image" if f".{suffix.lower()}" in IMAGE_SUFFIXES else suffix.lower()
        if kind == "image" and kind in parts:
            raise Refused(f"{_shown(key)} has two images; give each a name of its own")
        parts[kind] = member
        if len(seen) > MAX_SAMPLES:
            raise Refused(f"more than {MAX_SAMPLES:,} samples; split it into several archives")
    _add(index, key, parts, file)
    if not index.names:
        raise Refused(f"no images; each is a file such as 0001.jpg with its label in 0001.cls beside it ({_suffixes()})")
    return index


def _add(index: TarIndex, key: str, parts: dict[str, _Member], file: int) -> None:
    """One sample more, if these files are one."""
    image, cls, about = (parts.get(kind) for kind in ("image", "cls", "json"))
    if image is None:
        if cls is not None:
            raise Refused(f"{_shown(key)} has a label but no image; names of images are KEY.jpg, without further dots")
        return
    if cls is not None:
        label = _text(cls, file, MAX_CLS)
    elif about is not None:
        label = _json_label(about, file)
    else:
        raise Refused(f"{_shown(key)} has no label; put KEY.cls with its class right after it, or KEY.json with a field label")
    if not label or not label.isprintable():
        raise Refused(f"the label of {_shown(key)} is '{_shown(label)}'; write one class, by number or by name")
    index.names.append(image.name)
    index.labels.append(str(int(label)) if label.isascii() and label.isdecimal() and len(label) < 19 else label)
    index.starts.append(image.start)
    index.sizes.append(image.size)


def _json_label(member: _Member, file: int) -> str:
    try:
        value = json.loads(_text(member, file, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{_shown(member.name)} is not JSON; write it again") from error
    label = value.get("label") if isinstance(value, dict) else None
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise Refused(f"{_shown(member.name)} has no field label that is a number or a name; add it, or KEY.cls")
    return str(label).strip()


def _text(member: _Member, file: int, limit: int) -> str:
    if member.size > limit:
        raise Refused(f"{_shown(member.name)} has {member.size:,} bytes, more than a label of {limit:,}; write the class alone")
    try:
        return os.pread(file, member.size, member.start).decode().strip()
    except UnicodeDecodeError as error:
        raise Refused(f"{_shown(member.name)} is not text in UTF-8; write its class again") from error


def _members(path: Path, file: int, length: int) -> Iterator[_Member]:
    """The files of an archive from their headers. Only zeros end one: a damaged header must not look like its end."""
    position, given = 0, dict[str, str]()
    while True:
        block = os.pread(file, BLOCK, position)
        if len(block) == BLOCK and not any(block):
            return
        if position == 0 and block[:2] in _MAGIC:
            raise Refused(f"packed with {_MAGIC[block[:2]]}, so single images cannot be reached; unpack it to a plain .tar")
        if len(block) < BLOCK:
            raise Refused(f"cut short: it ends at byte {length:,} without the mark of the end; copy it again")
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise Refused(f"no tar archive, or damaged at byte {position:,}; copy it again") from error
        size = _size(given.get("size"), header.size)
        member = _Member(given.get("path", header.name), position + BLOCK, size)
        if size < 0 or member.start + size > length:
            raise Refused(f"cut short: {_shown(member.name)} goes beyond its last byte, {length:,}; copy it again")
        position = member.start + -(-size // BLOCK) * BLOCK
        if header.type in _LONG:
            given = _long(header.type, member, file)
            continue
        if any(key.startswith("GNU.sparse") for key in given):
            raise Refused(f"{_shown(member.name)} is stored with holes; pack it without --sparse")
        given = {}
        if header.type in _PASSED_OVER:
            continue
        check_member_name(path, member.name)
        if header.type not in tarfile.REGULAR_TYPES or header.type == tarfile.GNUTYPE_SPARSE:
            raise Refused(f"{_shown(member.name)} is a link or a device, which is not read; pack the file itself")
        yield member


def _long(kind: bytes, member: _Member, file: int) -> dict[str, str]:
    """What a header in front of a member says of it: {"path": ..., "size": ...}."""
    if member.size > MAX_NAME:
        raise Refused(f"a name of {member.size:,} bytes, more than {MAX_NAME:,}; pack it again")
    data = os.pread(file, member.size, member.start)
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": os.fsdecode(data.rstrip(b"\0"))}
    given = {}
    while data.rstrip(b"\0"):  # records "17 path=long_name\n", whose number counts the whole record
        count = data[:8].split(b" ")[0]
        if not count.isdigit() or not len(count) + 2 < int(count) <= len(data):
            raise Refused(f"damaged in the header at byte {member.start:,}; copy it again")
        key, _, value = data[len(count) + 1 : int(count) - 1].partition(b"=")
        given[os.fsdecode(key)] = os.fsdecode(value)
        data = data[int(count) :]
    return given


def _size(given: str | None, written: int) -> int:
    if given is None:
        return written
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 19 else -1


def _kept(values: Any, path: Path, file: int) -> TarIndex | None:
    """An earlier result, if it is whole and the archive has headers where it says."""
    try:
        index = TarIndex(str(path), *([kind(v) for v in values[key]] for key, kind in _COLUMNS.items()))
    except (KeyError, TypeError, ValueError):
        return None
    if not index.names or {len(index.labels), len(index.starts), len(index.sizes)} != {len(index.names)}:
        return None
    if min(index.starts) < BLOCK or min(index.sizes) < 0:
        return None
    ends = ((index.starts[i], index.sizes[i]) for i in (0, -1))
    return index if all(holds_member(os.pread(file, BLOCK, start - BLOCK), size) for start, size in ends) else None


def _shown(name: str) -> str:
    text = printable(name.lstrip("/"))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _suffixes() -> str:
    return ", ".join(sorted(IMAGE_SUFFIXES))


_COLUMNS: dict[str, type] = {"names": str, "labels": str, "starts": int, "sizes": int}
