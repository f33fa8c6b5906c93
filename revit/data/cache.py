"""Where things that were computed once are kept, and how a file is written so that it is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """REVIT_CACHE, or the user's cache folder."""
    chosen = os.environ.get("REVIT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "revit"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file for writing that takes its name only when the block has ended well and all bytes are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o666 & ~_umask())  # as any file of this user: a temporary one is for its owner alone
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The permissions that new files do not get; asking for it means setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def fingerprint(*parts: object) -> str:
    """A short name for a combination of values: the key of what was computed from them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_cached(name: str) -> Any | None:
    """A JSON value kept under this name, or nothing if it is not there or not readable."""
    try:
        return json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        return None


def keep_cached(name: str, value: Any) -> None:
    """Keeps a JSON value. A cache that cannot be written costs time, not the result: it is left out."""
    try:
        with whole_file(cache_folder() / name) as file:
            file.write(json.dumps(value).encode())
    except OSError:
        return
