"""Reading archives that others made: no member leaves the archive, and nothing grows beyond its limit.

Members are read as streams and never extracted under their own names, so a hostile name has nowhere to go.
"""

from __future__ import annotations

import gzip
import lzma
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from revit.data.cache import whole_file
from revit.data.spec import DataError

MAX_MEMBERS = 10_000
MAX_RATIO = 500
"""Unpacked over packed size. Zeros reach 1030 with deflate; images and tables of numbers stay below 50."""
SMALL = 64 * 2**20
"""Up to this many bytes the ratio does not matter: sorted labels shrink as well as a bomb does."""

_DAMAGE = (
    OSError, EOFError, ValueError, IndexError, OverflowError, NotImplementedError, MemoryError,
    struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


@contextmanager
def naming(path: Path, fix: str = "download it again") -> Iterator[None]:
    """Turns what the libraries raise on a damaged file into one line that names the file and the fix."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read ({reason}); {fix}") from error


def byte_limit(path: Path, max_bytes: int) -> int:
    """How many bytes may come out of this file: the cap, or less if that would be a bomb's ratio."""
    return min(max_bytes, max(SMALL, MAX_RATIO * path.stat().st_size))


def checked_members(archive: zipfile.ZipFile, path: Path, max_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """The files of a zip by name, after its headers were checked: nothing is unpacked before."""
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise DataError(f"{path}: holds {len(members)} members, at most {MAX_MEMBERS} are read; this is not an archive of data")
    for member in members:
        check_member_name(path, member.filename)
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{path}: {member.filename!r} is a link, which is not followed; pack the file itself")
        if member.flag_bits & 1:
            raise DataError(f"{path}: {member.filename!r} is encrypted; pack it without a password")
    total, limit = sum(member.file_size for member in members), byte_limit(path, max_bytes)
    if total > limit:
        raise DataError(f"{path}: claims {total:,} bytes, at most {limit:,} are unpacked from a file of this size")
    return {member.filename: member for member in members if not member.is_dir()}


@contextmanager
def open_zip_member(path: Path, name: str, max_bytes: int) -> Iterator[IO[bytes]]:
    """A member of a zip as a stream, found by the last part of its name."""
    with naming(path), zipfile.ZipFile(path) as archive:
        members = checked_members(archive, path, max_bytes)
        matches = [member for full, member in members.items() if PurePosixPath(full).name == name]
        if len(matches) != 1:
            raise DataError(f"{path}: holds {len(matches)} files named {name}, one is needed; download the archive again")
        with archive.open(matches[0]) as stream:
            yield stream


def read_tar(path: Path, wanted: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """The wanted files of a .tar or .tar.gz by the last part of their names; the rest is checked and passed over."""
    found: dict[str, bytes] = {}
    with naming(path), open_packed(path, max_bytes) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise DataError(f"{path}: holds more than {MAX_MEMBERS} members; this is not an archive of data")
            check_member_name(path, member.name)
            if member.isdir():
                continue
            file = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if file is None:
                raise DataError(f"{path}: {member.name!r} is a link or a device, which is not read; pack the file itself")
            name = PurePosixPath(member.name).name
            if name in wanted:
                found[name] = file.read()
    return found


@contextmanager
def open_packed(path: Path, max_bytes: int) -> Iterator[IO[bytes]]:
    """A file for reading, gzipped or not (its first bytes say so), that ends with an error beyond the limit."""
    with naming(path):
        raw = open(path, "rb")  # noqa: SIM115 (closed below; errors of the caller's block are not errors of this file)
    with raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        source = gzip.GzipFile(fileobj=raw) if packed else raw
        yield cast(IO[bytes], _Limited(source, path, byte_limit(path, max_bytes) if packed else max_bytes))


def unpack_gzip(packed: Path, target: Path, max_bytes: int) -> None:
    """Writes the content of a .gz file to the target, which is whole or not there."""
    try:
        with open_packed(packed, max_bytes) as stream, whole_file(target) as file:
            shutil.copyfileobj(stream, file, 2**20)
    except OSError as error:  # of the target: those of the packed file are a DataError already
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"{target}: cannot be written ({reason}); make room, or unpack {packed.name} in another folder"
        ) from error


class _Limited:
    """Passes on what a stream gives, counts it, and stops at the limit."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile, path: Path, limit: int) -> None:
        self.source, self.path, self.limit, self.count = source, path, limit, 0

    def read(self, size: int = -1) -> bytes:
        left = self.limit - self.count
        with naming(self.path):
            data = self.source.read(left + 1 if size < 0 else min(size, left + 1))
        self.count += len(data)
        if self.count > self.limit:
            raise DataError(
                f"{self.path}: unpacks to more than {self.limit:,} bytes, the limit for a file of this kind and size"
            )
        return data


def check_member_name(path: Path, name: str) -> None:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name):
        raise DataError(f"{path}: the member {name!r} points outside the archive; do not use this file")
