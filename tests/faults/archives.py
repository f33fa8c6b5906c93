"""2. Hostile archives: no member leaves them, nothing grows beyond its limit."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from revit.data.archives import open_zip_member, read_tar, unpack_gzip
from revit.data.spec import DataError
from tests.data.test_archives import make_tar, make_zip, special
from tests.faults.tally import Tally, refused

MB = 2**20


def archives(folder: Path, count: int, seed: int) -> Tally:
    """Names that lead outside, links, devices, bombs, endless lists of members: refused, and nothing is written anywhere."""
    tally, inside = Tally(), folder / "outer" / "inner"
    inside.mkdir(parents=True)
    limit = 64 * MB

    def trial(what: str, path: Path, read: Callable[[], object]) -> None:
        before = _tree(folder)
        with tally.trial(what):
            with refused(DataError, path.name):
                read()
            assert _tree(folder) == before, "something was written"

    def by_zip(path: Path) -> object:
        with open_zip_member(path, "one", limit) as stream:
            return stream.read()

    for name in ("../one", "../../one", "a/../../one", "/one", str(folder / "one"), "..\\one", "C:\\one", "./../one"):
        zipped, tarred = make_zip(inside / "a.zip", **{name: b"x"}), make_tar(inside / "a.tar.gz", (name, b"x"))
        trial(f"zip with {name}", zipped, lambda path=zipped: by_zip(path))
        if "\\" not in name or name.startswith(".."):
            trial(f"tar with {name}", tarred, lambda path=tarred: read_tar(path, ("one",), limit))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.GNUTYPE_SPARSE):
        path = make_tar(inside / "b.tar", special("one", kind, "/etc/passwd"), mode="w")
        trial(f"tar with a member of type {kind!r}", path, lambda path=path: read_tar(path, ("one",), limit))
    link = zipfile.ZipInfo("one")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(inside / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    trial("zip with a link", inside / "link.zip", lambda: by_zip(inside / "link.zip"))
    bomb = make_zip(inside / "bomb.zip", one=bytes(100 * MB))
    trial("zip, 1000 to 1", bomb, lambda: by_zip(bomb))
    bomb = make_tar(inside / "bomb.tar.gz", ("one", bytes(100 * MB)))
    trial("tar.gz, 1000 to 1", bomb, lambda: read_tar(bomb, ("one",), 2**33))
    packed = inside / "bomb.gz"
    packed.write_bytes(gzip.compress(bytes(100 * MB)))
    trial("gz, 1000 to 1", packed, lambda: unpack_gzip(packed, inside / "target", 2**33))
    many = make_zip(inside / "many.zip", **{f"f{i}": b"" for i in range(10_001)})
    trial("zip of 10,001 members", many, lambda: by_zip(many))
    many = make_tar(inside / "many.tar", *((f"f{i}", b"") for i in range(10_001)), mode="w")
    trial("tar of 10,001 members", many, lambda: read_tar(many, ("one",), limit))
    return tally


def _tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}
