"""Where images lie in an archive: as Python's tarfile finds them; hostile and damaged archives are refused in one line."""

import gzip
import os
import shutil
import tarfile

import pytest

from revit.data import tar_index as module
from revit.data.spec import DataError
from revit.data.tar_index import BLOCK, holds_member, tar_index
from tests.data.tars import png, samples, write_tar

LONG = "folder/" + 40 * "long_name_" + "/0009"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_index_is_what_tarfile_reads(tmp_path, form):
    members = samples(0, 4)
    if form != tarfile.USTAR_FORMAT:
        members += [(f"{LONG}.png", png(9)), (f"{LONG}.cls", b"dog"), ("0010.png", png(10)), ("0010.json", b'{"label": 7}')]
    path = write_tar(tmp_path / "a.tar", members, format=form)
    index, data = tar_index(path), path.read_bytes()
    with tarfile.open(path) as archive:
        images = [member for member in archive if member.name.endswith(".png")]
        assert index.names == [member.name for member in images]
        assert index.starts == [member.offset_data for member in images]
        assert index.sizes == [member.size for member in images]
    assert index.labels[:4] == ["cat", "dog", "cat", "dog"]
    for start, size in zip(index.starts, index.sizes, strict=True):
        assert data[start : start + 4] == b"\x89PNG" and holds_member(data[start - BLOCK : start], size)
        assert not holds_member(data[start - BLOCK : start], size + 1)
    if form != tarfile.USTAR_FORMAT:
        assert index.names[4] == f"{LONG}.png" and index.labels[4:] == ["dog", "7"]


def test_labels_are_numbers_or_names_and_other_files_are_passed_over(tmp_path):
    members = [
        ("README", b"hello"), ("._0.png", b"junk"), ("d/0.JPG", b"x"), ("d/0.cls", b" 007\n"), ("d/0.seg.png", b"mask"),
        ("1.webp", b"x"), ("1.json", b'{"label": "tree frog", "id": 3}'), ("1.txt", b"a frog"),
        ("2.tif", b"x"), ("2.cls", "café".encode()), ("2.json", b'{"label": "the .cls wins"}'),
    ]  # fmt: skip
    index = tar_index(write_tar(tmp_path / "a.tar", members))
    assert index.names == ["d/0.JPG", "1.webp", "2.tif"] and index.labels == ["7", "tree frog", "café"]


def special(kind, name="0.png", target="/etc/passwd"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([special(tarfile.SYMTYPE)], "0.png is a link or a device, which is not read"),
        ([special(tarfile.LNKTYPE)], "link or a device"),
        ([special(tarfile.CHRTYPE)], "link or a device"),
        ([special(tarfile.FIFOTYPE)], "link or a device"),
        ([special(tarfile.GNUTYPE_SPARSE)], "link or a device"),
        ([("/etc/0.png", b"x")], "points outside the archive"),
        ([("a/../../0.png", b"x")], "points outside the archive"),
        ([("0.png", b"x")], "0 has no label; put KEY.cls"),
        ([("0.cls", b"1")], "0 has a label but no image"),
        ([("a.v2.png", b"x"), ("a.cls", b"1")], "a has a label but no image; names of images are KEY.jpg"),
        ([("0.png", b"x"), ("0.jpg", b"x"), ("0.cls", b"1")], "0 has two images"),
        ([("0.png", b"x"), ("1.png", b"x"), ("0.cls", b"1"), ("1.cls", b"1")], "0 has no label"),
        ([("0.png", b"x"), ("0.cls", b"1"), ("1.png", b"x"), ("1.cls", b"1"), ("0.json", b"{}")], "0 do not lie together"),
        ([("0.png", b"x"), ("0.cls", b"a\nb")], r"the label of 0 is 'a\\nb'; write one class"),
        ([("0.png", b"x"), ("0.cls", b"\xff\xfe")], "0.cls is not text"),
        ([("0.png", b"x"), ("0.cls", 5000 * b"1")], "0.cls has 5,000 bytes, more than a label"),
        ([("0.png", b"x"), ("0.json", b"{")], "0.json is not JSON"),
        ([("0.png", b"x"), ("0.json", 100_000 * b"[")], "0.json is not JSON"),
        ([("0.png", b"x"), ("0.json", b'{"label": true}')], "0.json has no field label"),
        ([("0.txt", b"x")], "no images; each is a file such as 0001.jpg"),
        ([], "no images"),
    ],
)  # fmt: skip
def test_hostile_archives_are_refused_by_name(tmp_path, members, words, refused):
    path = write_tar(tmp_path / "a.tar", members)
    with refused(path):
        tar_index(path)
    with pytest.raises(DataError, match=words):
        tar_index(path)


def test_every_cut_and_every_damaged_header_is_seen(tmp_path, refused):
    whole = write_tar(tmp_path / "whole.tar", samples(0, 3)).read_bytes()
    index = tar_index(tmp_path / "whole.tar")
    end = len(whole.rstrip(b"\0")) // BLOCK * BLOCK + BLOCK  # of the last member
    path = tmp_path / "a.tar"
    for length in (0, 100, BLOCK, index.starts[1] + 1, index.starts[2] - BLOCK, index.starts[2], end, end + 100):
        path.write_bytes(whole[:length])
        with refused(path, "cut short"):
            tar_index(path)
    for start in index.starts[1:]:
        path.write_bytes(whole[: start - 300] + b"\xa5" + whole[start - 299 :])
        with refused(path, f"damaged at byte {start - BLOCK:,}"):
            tar_index(path)
    path.write_bytes(gzip.compress(whole))
    with refused(path, "packed with gzip", "unpack it to a plain .tar"):
        tar_index(path)


def test_what_headers_claim_is_not_read(tmp_path, refused):
    huge = tarfile.TarInfo("0.png")
    huge.size = 1 << 60
    path = tmp_path / "a.tar"
    path.write_bytes(huge.tobuf(tarfile.GNU_FORMAT) + 10 * BLOCK * b"\0")
    with refused(path, "cut short", "0.png"):
        tar_index(path)
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
        long = special(kind, "name")
        long.size = 2 << 20
        path.write_bytes(long.tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, 4 << 20)  # a file with a hole: nothing is stored
        with refused(path, "a name of 2,097,152 bytes"):
            tar_index(path)
    for record in (b"99 path=a\n", b"x path=a\n", b"3 a\n", b"path"):
        long = special(tarfile.XHDTYPE, "name")
        long.size = len(record)
        path.write_bytes(long.tobuf() + record.ljust(BLOCK, b"\0") + 2 * BLOCK * b"\0")
        with refused(path, "damaged in the header"):
            tar_index(path)
    sparse = write_tar(path, [special(tarfile.XHDTYPE, "pax")])
    record = b"22 GNU.sparse.major=1\n"
    long = special(tarfile.XHDTYPE, "pax")
    long.size = len(record)
    inner = tarfile.TarInfo("0.png")
    sparse.write_bytes(long.tobuf() + record.ljust(BLOCK, b"\0") + inner.tobuf() + 2 * BLOCK * b"\0")
    with refused(path, "stored with holes"):
        tar_index(path)


def test_an_index_is_kept_until_the_file_changes_and_is_not_believed(tmp_path, cache, monkeypatch):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    first = tar_index(path)
    (kept,) = (cache / "shards").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_index", None)
        assert tar_index(path) == first  # from the cache
    good = kept.read_text()
    for text in (
        "",
        "[]",
        "{}",
        good.replace("[512,", "[99999999,"),
        good.replace("[512,", "[0,"),
        good.replace('"cat", ', "", 1),
    ):
        kept.write_text(text)
        assert tar_index(path) == first and kept.read_text() == good
    # Another archive in its place, with the same size and time: its headers lie elsewhere.
    before = path.stat()
    members = samples(0, 3)
    other = write_tar(tmp_path / "b.tar", [("README", b"first"), *members])
    assert other.stat().st_size == before.st_size
    shutil.copyfile(other, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tar_index(path).starts == tar_index(other).starts != first.starts
