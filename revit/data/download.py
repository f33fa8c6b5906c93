"""Fetching the official files: https only, resumed where it stopped, and checked before a file takes its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from revit.data.cache import cache_folder
from revit.data.registry import data_root
from revit.data.spec import DataError, DataOptions

if sys.platform != "win32":
    import fcntl

CHUNK = 2**20
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 4
PAUSE = 2.0  # seconds before the second attempt, doubled before each further one
_PASSING = (408, 429, 500, 502, 503, 504)  # answers of a server that may do better later

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are here and all bytes, if the server says how many."""


@dataclass(frozen=True)
class Remote:
    """An official file: its name, where it is, its checksum, and a size that it certainly stays below."""

    name: str
    url: str
    md5: str
    max_bytes: int


# Address and sum: mnist_rot.py of separable-group-convolutional-networks (Knigge et al.), which the released code follows.
# It has http; the same server gives the files of this folder by https.
ROTMNIST = Remote(
    "mnist_rotation_new.zip",
    "https://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip",
    "0f9a947ff3d30e95cd685462cbf3b847",
    100 * 10**6,
)

# Mirror and sums: torchvision/datasets/mnist.py.
MNIST = tuple(
    Remote(name, f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", md5, 20 * 10**6)
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    )
)

# Address and sum: the page of its authors, www.cs.toronto.edu/~kriz/cifar.html. The binary version needs no unpickling.
CIFAR10 = Remote(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    200 * 10**6,
)

# Record 2546921 of its authors; sums from torchvision/datasets/pcam.py. The table in the authors' README exchanges those of
# valid and test; they confirm the files to be right (basveeling/pcam, issue 1), as torchvision found (pull request 6644).
PCAM = tuple(
    Remote(name, f"https://zenodo.org/records/2546921/files/{name}?download=1", md5, max_bytes)
    for name, md5, max_bytes in (
        ("camelyonpatch_level_2_split_train_x.h5.gz", "1571f514728f59376b705fc836ff4b63", 8 * 10**9),
        ("camelyonpatch_level_2_split_train_y.h5.gz", "35c2d7259d906cfc8143347bb8e05be7", 10**6),
        ("camelyonpatch_level_2_split_valid_x.h5.gz", "d5b63470df7cfa627aeec8b9dc0c066e", 10**9),
        ("camelyonpatch_level_2_split_valid_y.h5.gz", "2b85f58b927af9964a4c15b8f7e8f179", 10**6),
        ("camelyonpatch_level_2_split_test_x.h5.gz", "d8c2d60d490dbd479f8199bdfa0cf6ec", 10**9),
        ("camelyonpatch_level_2_split_test_y.h5.gz", "60a7035772fbdb7f34eb86d4420cf66a", 10**6),
    )
)


def dataset_folder(options: DataOptions) -> Path:
    """The user's folder. A download makes it if need be, and goes into the cache folder if the user named none."""
    if not options.download:
        named = Path(options.file or "").expanduser()
        return named.parent if options.root is None and named.is_absolute() else data_root(options)
    folder = Path(options.root).expanduser() if options.root else cache_folder() / "downloads" / options.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be made ({error.strerror}); --data-root names the folder of {options.name}"
        ) from error
    return folder


def fetch(remote: Remote, folder: Path) -> Path:
    """The official file in this folder, downloaded if it is not there."""
    path = folder / remote.name
    download(remote.url, path, md5=remote.md5, max_bytes=remote.max_bytes, progress=_terminal_line(remote.name))
    return path


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _check_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_https(request: urllib.request.Request, timeout: float) -> Any:
    """`urllib.request.urlopen`, except that no redirect leaves https."""
    return urllib.request.build_opener(_HttpsOnly).open(request, timeout=timeout)


def download(
    url: str,
    path: Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    max_bytes: int,
    progress: Progress | None = None,
    opener: Callable[..., Any] = open_https,
) -> None:
    """Fetches a file unless it is there. What has arrived stays in `<name>.part`, where the next attempt goes on."""
    if (md5 is None) == (sha256 is None):
        raise ValueError("a download is checked by its md5 or its sha256: give one of them")
    _check_https(url)
    algorithm, wanted = ("md5", md5) if md5 else ("sha256", sha256)
    part = path.with_name(f"{path.name}.part")
    if path.exists():
        return
    with _alone(path):
        if path.exists():  # another process was first
            return
        _transfer_patiently(url, part, max_bytes, progress, opener)
        found = checksum(part, algorithm)
        if found != wanted:
            part.unlink()
            raise DataError(f"{url}: the download has {algorithm} {found} instead of {wanted} and was deleted; try again later")
        os.replace(part, path)


def checksum(path: Path, algorithm: str = "md5") -> str:
    """Hexadecimal digest of a file: against damage, not against forgery."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _transfer_patiently(url: str, part: Path, max_bytes: int, progress: Progress | None, opener: Callable[..., Any]) -> None:
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _transfer(url, part, max_bytes, progress, opener)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():  # nothing behind our part: it is complete, or not of this file
                if error.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
                    return None
                part.unlink()
            elif error.code not in _PASSING:
                raise DataError(
                    f"{url}: the server answers {error.code} {error.reason}; look whether the address still exists"
                ) from error
            reason = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
    raise DataError(f"{url}: no complete answer in {ATTEMPTS} attempts ({reason}); look at the network and run again to go on")


def _transfer(url: str, part: Path, max_bytes: int, progress: Progress | None, opener: Callable[..., Any]) -> None:
    """One attempt, from the end of the part if the server can."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "revit", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with opener(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        _check_https(response.geturl())
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            raise http.client.HTTPException("the server sends another range than the one asked for")
        if response.status != 206:
            have = 0  # the whole file: this server does not resume
        length = response.headers.get("Content-Length") or ""
        total = have + int(length) if length.isdecimal() else None
        _check_size(url, part, total or 0, max_bytes)
        with _opened(part, "ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                have += len(chunk)
                _check_size(url, part, have, max_bytes)
                _append(file, chunk, part)
                if progress:
                    progress(have, total)
        if total is not None and have < total:
            raise http.client.HTTPException(f"the connection ended after {have:,} of {total:,} bytes")


def _opened(path: Path, mode: str) -> IO[bytes]:
    try:
        return cast(IO[bytes], open(path, mode))
    except OSError as error:
        raise DataError(f"{path.parent}: cannot be written to ({error.strerror}); choose another --data-root") from error


def _append(file: IO[bytes], chunk: bytes, part: Path) -> None:
    """Writes to the disk at once: errors of the disk must not look like errors of the network, which are tried again."""
    try:
        file.write(chunk)
        file.flush()
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror}); make room or choose another --data-root") from error


def _check_https(url: str) -> None:
    if not url.startswith("https://"):
        raise DataError(f"{url}: not an https address, so nothing was fetched from it")


def _check_size(url: str, part: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        part.unlink(missing_ok=True)
        raise DataError(f"{url}: {size:,} bytes or more, at most {max_bytes:,} are fetched; this is not the official file")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits while another process fetches the same file: all processes of a training run start together."""
    lock = path.with_name(f".{path.name}.lock")
    with _opened(lock, "wb") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        lock.unlink(missing_ok=True)  # after a success only: those who still wait find the file and need no lock


def _terminal_line(name: str) -> Progress | None:
    """Progress on one line of the terminal, if there is one."""
    if not sys.stderr.isatty():
        return None

    def show(have: int, total: int | None) -> None:
        share = f" of {total / 1e6:,.0f} MB" if total else " MB"
        sys.stderr.write(f"\r{name}: {have / 1e6:,.0f}{share}" + ("\n" if have == total else ""))

    return show
