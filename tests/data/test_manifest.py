"""CSV manifests: what they may say, and errors that name the line."""

import numpy as np
import pytest
from PIL import Image

from revit.data.manifest import read_manifest
from revit.data.registry import open_dataset
from revit.data.spec import DataError, DataOptions


def manifest(folder, text, encoding="utf-8"):
    folder.mkdir(exist_ok=True)
    (folder / "list.csv").write_bytes(text.encode(encoding, "surrogateescape"))
    return folder / "list.csv"


def read(folder, text, **options):
    return read_manifest(manifest(folder, text, **options), folder)


def fails(folder, text, match):
    with pytest.raises(DataError, match=match) as caught:
        read(folder, text)
    assert "list.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_dataset_of_a_manifest(tmp_path):
    lines = ["path,label,split"]
    for part, count in (("train", 6), ("Valid", 2), ("test", 4)):
        for i in range(count):
            Image.fromarray(np.full((4, 4), i, dtype=np.uint8)).save(tmp_path / f"{part}{i}.png")
            lines.append(f"{part}{i}.png,{'cat' if i % 2 else 'dog'},{part}")
    manifest(tmp_path, "\n".join(lines))
    data = open_dataset(DataOptions(name="folder", root=str(tmp_path), file="list.csv"))
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [6, 2, 4]
    assert data.spec.classes == ("cat", "dog") and data.spec.source == "manifest list.csv"
    for i in range(4):
        number = int(data.test.name(i)[-5])
        assert (data.test.read(i) == number).all() and data.test.labels[i] == (number % 2 == 0)
    again = open_dataset(DataOptions(name="folder", file=str(tmp_path / "list.csv")))
    assert again.spec == data.spec
    (tmp_path / "train3.png").unlink()
    with pytest.raises(DataError, match=r"train3.png: no such file.*1 of 12"):
        open_dataset(DataOptions(name="folder", root=str(tmp_path), file="list.csv"))


def test_without_splits(tmp_path):
    listing = read(tmp_path, "label, Path ,camera\r\ncat,a.png,x\r\n\r\n dog , b c.png,y\r\n")
    assert listing.labels == ["cat", "dog"] and listing.parts == ["", ""]
    assert listing.paths == [str(tmp_path / "a.png"), str(tmp_path / "b c.png")]


def test_quotes_marks_and_odd_bytes(tmp_path):
    listing = read(tmp_path, '\ufeffpath,label\n"a,b.png",cat\n"say ""x"".png",größe\n')
    assert (
        listing.paths[0].endswith("a,b.png")
        and listing.paths[1].endswith('say "x".png')
        and listing.classes == ["cat", "größe"]
    )
    assert read(tmp_path, "path,label\n\udce9.png,cat\nb.png,dog\n").paths[0].endswith("\udce9.png")


def test_paths_stay_below_the_root(tmp_path):
    (tmp_path / "lists").mkdir()
    inside = manifest(tmp_path / "lists", f"path,label\n../a.png,cat\n{tmp_path}/b.png,dog\nc.png,dog\n")
    assert read_manifest(inside, tmp_path).paths == [str(tmp_path / name) for name in ("a.png", "b.png", "lists/c.png")]
    for path in ("../a.png", "/etc/passwd", "x/../../a.png", f"{tmp_path}/lists/../b.png", f"{tmp_path}/listsx/b.png"):
        fails(tmp_path / "lists", f"path,label\n{path},cat\n", r"line 2: .* lies outside of .*lists; list images below")


def test_manifest_elsewhere_is_relative_to_the_root(tmp_path):
    (tmp_path / "images").mkdir()
    listing = read_manifest(manifest(tmp_path / "lists", "path,label\na.png,cat\nb.png,dog\n"), tmp_path / "images")
    assert listing.paths == [str(tmp_path / "images" / name) for name in ("a.png", "b.png")]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "lists no images"),
        ("path,label\n", "lists no images"),
        ("file,label\na.png,cat\n", "line 1: no column path among file, label"),
        ("path,class\na.png,cat\n", "line 1: no column label"),
        ("path,label,path\n", "line 1: two columns have one name"),
        ("path,label\na.png,cat\nb.png\n", "line 3: 1 fields where the header has 2"),
        ("path,label\na.png,cat\nb,c.png,dog\n", "line 3: 3 fields where the header has 2; quote"),
        ("path,label\na.png,cat\nb.png, \n", "line 3: no label"),
        ("path,label\na.png,cat\n,dog\n", "line 3: no path"),
        ("path,label\na.png,cat\n./a.png,dog\n", r"line 3: ./a.png is already in line 2"),
        ("path,label\na.png,cat\nb.png,cat\n", "one class only, cat"),
        ("path,label,split\na.png,cat,train\nb.png,dog,dev\n", "line 3: split is dev; write train, val or test"),
        ("path,label,split\na.png,cat,train\nb.png,dog,\n", "line 3: split is empty"),
        ("path,label,split\na.png,cat,test\nb.png,dog,val\n", "no image is for train"),
        ("path,label,split\na.png,cat,train\nb.png,dog,test\n", "class dog is in test but not in train"),
        ('path,label\na.png,cat\n"b.png"x,dog\n', "line 3: not CSV"),
    ],
)
def test_errors_name_the_line(tmp_path, text, match):
    fails(tmp_path, text, match)


def test_manifest_that_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"list.csv: cannot be read \(No such file"):
        open_dataset(DataOptions(name="folder", root=str(tmp_path), file="list.csv"))
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_manifest(tmp_path, tmp_path)
