"""Archives of others: what is in them comes out, what would do harm does not."""

import gzip
import io
import tarfile
import zipfile

import pytest

from revit.data import archives
from revit.data.archives import checked_members, open_packed, open_zip_member, read_tar, unpack_gzip

LIMIT = 2**20


def make_zip(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def members_of(path, limit=LIMIT):
    with zipfile.ZipFile(path) as archive:
        return checked_members(archive, path, limit)


def test_zip_member_is_found_by_its_last_name(tmp_path):
    path = make_zip(tmp_path / "a.zip", **{"folder/one.txt": b"first\nsecond\n", "two.txt": b""})
    with open_zip_member(path, "one.txt", LIMIT) as stream:
        assert stream.readline() == b"first\n"
        assert stream.read() == b"second\n"


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.txt", "a/../../up.txt", "..\\up.txt", "C:\\up.txt", "c:up.txt"])
def test_zip_names_stay_inside(tmp_path, refused, name):
    path = make_zip(tmp_path / "a.zip", **{name: b"x"})
    with refused("a.zip", "outside"):
        members_of(path)


def test_zip_links_and_passwords_are_refused(tmp_path, refused):
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with refused("a.zip", "'link' is a link"):
        members_of(tmp_path / "a.zip")
    data = bytearray(make_zip(tmp_path / "b.zip", secret=b"x").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag of encryption in the central directory
    (tmp_path / "b.zip").write_bytes(data)
    with refused("b.zip", "'secret' is encrypted"):
        members_of(tmp_path / "b.zip")


def test_zip_limits_are_checked_before_unpacking(tmp_path, refused, monkeypatch):
    path = make_zip(tmp_path / "a.zip", zeros=bytes(300_000), few=b"12")
    assert sorted(members_of(path)) == ["few", "zeros"]
    with refused("a.zip", "claims 300,002 bytes", "at most 300,001"):
        members_of(path, 300_001)
    monkeypatch.setattr(archives, "SMALL", 200_000)  # so that a small bomb counts: zeros shrink a thousandfold
    with refused("a.zip", "claims 300,002 bytes"):
        members_of(path)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 1)
    with refused("a.zip", "2 members"):
        members_of(path)


def test_real_bomb(tmp_path, refused):
    path = make_zip(tmp_path / "bomb.zip", zeros=bytes(80 * 2**20))
    assert path.stat().st_size < 100_000
    with refused("bomb.zip", "claims 83,886,080 bytes"), open_zip_member(path, "zeros", 2**40):
        pytest.fail("opened")


def test_zip_damage_is_named(tmp_path, refused):
    path = make_zip(tmp_path / "a.zip", **{"x/data": bytes(range(256)) * 100, "y/data": b"", "text": b"hello " * 1000})
    with refused("a.zip", "0 files named nothing"), open_zip_member(path, "nothing", LIMIT):
        pass
    with refused("a.zip", "2 files named data"), open_zip_member(path, "data", LIMIT):
        pass
    whole = path.read_bytes()
    for cut in (b"", b"not a zip", whole[:-30]):
        path.write_bytes(cut)
        with refused("a.zip", "cannot be read", "download it again"), open_zip_member(path, "text", LIMIT):
            pass
    spoilt = bytearray(whole)
    spoilt[spoilt.index(b"text") + 10] ^= 0xFF
    path.write_bytes(spoilt)
    with refused("a.zip", "cannot be read"), open_zip_member(path, "text", LIMIT) as stream:
        stream.read()


def make_tar(path, *members, mode="w:gz"):
    """Members are (name, bytes) or a ready TarInfo."""
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_tar_gives_what_is_wanted(tmp_path, mode):
    path = make_tar(tmp_path / "a.tar", special("d", tarfile.DIRTYPE), ("d/one", b"1" * 1000), ("d/two", b"2"), mode=mode)
    assert read_tar(path, ("one", "three"), LIMIT) == {"one": b"1" * 1000}


@pytest.mark.parametrize(
    "member",
    [
        special("bad", tarfile.SYMTYPE, "/etc/passwd"),
        special("bad", tarfile.LNKTYPE, "one"),
        special("bad", tarfile.FIFOTYPE),
        special("bad", tarfile.CHRTYPE),
        special("bad", tarfile.BLKTYPE),
        special("bad", tarfile.GNUTYPE_SPARSE),
    ],
    ids=["symlink", "hardlink", "fifo", "character device", "block device", "sparse"],
)
def test_tar_reads_plain_files_only(tmp_path, refused, member):
    with refused("a.tar.gz", "'bad' is a link or a device"):
        read_tar(make_tar(tmp_path / "a.tar.gz", ("one", b"1"), member), ("one", "bad"), LIMIT)


@pytest.mark.parametrize("name", ["/one", "../one", "a/../../one"])
def test_tar_names_stay_inside(tmp_path, refused, name):
    with refused("a.tar.gz", "outside"):
        read_tar(make_tar(tmp_path / "a.tar.gz", (name, b"1")), ("one",), LIMIT)


def test_tar_limits(tmp_path, refused, monkeypatch):
    path = make_tar(tmp_path / "a.tar.gz", ("zeros", bytes(400_000)), ("one", b"1"))
    assert read_tar(path, ("one",), LIMIT) == {"one": b"1"}
    with refused("a.tar.gz", "more than 300,000 bytes"):
        read_tar(path, ("one",), 300_000)
    monkeypatch.setattr(archives, "SMALL", 1000)
    with refused("a.tar.gz", "unpacks to more than"):
        read_tar(path, ("one",), LIMIT)
    monkeypatch.undo()
    monkeypatch.setattr(archives, "MAX_MEMBERS", 1)
    with refused("a.tar.gz", "more than 1 members"):
        read_tar(path, ("one",), LIMIT)


def test_tar_damage_is_named(tmp_path, refused):
    path = make_tar(tmp_path / "a.tar.gz", ("one", bytes(range(256)) * 400))
    whole = path.read_bytes()
    for cut in (b"", b"text, not tar" * 100, whole[: len(whole) // 2], gzip.compress(b"text, not tar" * 100)):
        path.write_bytes(cut)
        with refused("a.tar.gz", "cannot be read"):
            read_tar(path, ("one",), LIMIT)
    with refused("none.tar", "cannot be read"):
        read_tar(tmp_path / "none.tar", ("one",), LIMIT)


def test_packed_or_not(tmp_path, refused):
    for name, data in (("plain", b"content"), ("packed", gzip.compress(b"content"))):
        (tmp_path / name).write_bytes(data)
        with open_packed(tmp_path / name, LIMIT) as stream:
            assert (stream.read(3), stream.read()) == (b"con", b"tent")
        with open_packed(tmp_path / name, 7) as stream:
            assert stream.read() == b"content"
        with refused(name, "more than 6 bytes"), open_packed(tmp_path / name, 6) as stream:
            stream.read()


def test_unpacking_is_whole_or_nothing(tmp_path, refused):
    packed, target = tmp_path / "a.h5.gz", tmp_path / "out" / "a.h5"
    packed.write_bytes(gzip.compress(b"content" * 1000))
    unpack_gzip(packed, target, LIMIT)
    assert target.read_bytes() == b"content" * 1000
    target.unlink()
    packed.write_bytes(packed.read_bytes()[:-12])
    with refused("a.h5.gz", "cannot be read", "download it again"):
        unpack_gzip(packed, target, LIMIT)
    assert list(target.parent.iterdir()) == []
    packed.write_bytes(gzip.compress(b"content"))
    with refused(packed / "a.h5", "cannot be written", "unpack a.h5.gz in another folder"):
        unpack_gzip(packed, packed / "a.h5", LIMIT)
