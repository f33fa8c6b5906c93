"""3. Images and data: every odd or broken file has its documented result, and what is wrong is named."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from revit.data import DataOptions, Dataset, open_dataset
from revit.data.image_files import image_header, read_image
from revit.data.loader import EvalLoader, Reading
from revit.data.spec import BadImage, DataError
from tests.data import test_amat, test_pcam
from tests.data.test_image_files import png
from tests.faults.tally import Tally, refused

GREY = np.arange(24 * 20, dtype=np.uint8).reshape(24, 20)
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)


def images(folder: Path, count: int, seed: int) -> Tally:
    """Image files of every odd kind: those that can be read give the documented array, the others one error with their name."""
    tally = Tally()

    def saved(name: str, array: np.ndarray, mode: str | None = None, **options: object) -> Path:
        Image.fromarray(array, mode=mode).save(folder / name, **options)  # type: ignore[arg-type]
        return folder / name

    def good(what: str, path: Path, expected: np.ndarray, tolerance: float = 0) -> None:
        with tally.trial(what):
            pixels, header = read_image(path), image_header(path)
            assert pixels.shape == expected.shape and tuple(header)[:3] == expected.shape, f"shape {pixels.shape}"
            assert np.abs(pixels.astype(float) - expected).max() <= tolerance, "other pixels"

    def bad(what: str, path: Path, *words: str) -> None:
        with tally.trial(what), refused(BadImage, path.name, *words):
            read_image(path)

    cyan = np.zeros((8, 8, 4), dtype=np.uint8)
    cyan[..., 0] = 255
    good("CMYK", saved("cmyk.tif", cyan, "CMYK"), np.stack([np.zeros((8, 8)), *[np.full((8, 8), 255.0)] * 2]), 3)
    deep = (np.arange(480).reshape(24, 20) * 136).astype(np.uint16)
    good("16 bits", saved("deep.png", deep), deep[None] / 65535, 1e-6)
    with_alpha = np.concatenate([COLOUR, np.full((24, 20, 1), 7, np.uint8)], axis=-1)
    good("alpha", saved("alpha.png", with_alpha), COLOUR.transpose(2, 0, 1))
    turned = Image.Exif()
    turned[0x112] = 6
    good("EXIF-turned", saved("turned.png", GREY, exif=turned), np.rot90(GREY, -1)[None])
    frames = [Image.fromarray(frame) for frame in (COLOUR, COLOUR[::-1])]
    frames[0].save(folder / "moving.png", save_all=True, append_images=frames[1:])
    good("animated", folder / "moving.png", COLOUR.transpose(2, 0, 1))
    good("1 x 1", saved("point.png", GREY[:1, :1]), GREY[None, :1, :1])
    Image.fromarray(GREY).save(folder / "png.jpg", format="png")
    good("wrong extension", folder / "png.jpg", GREY[None])

    for kind in ("png", "jpg", "gif", "webp", "bmp", "tif", "ppm"):
        whole = saved(f"whole.{kind}", COLOUR).read_bytes()
        for share in (0.05, 0.3, 0.6, 0.9):
            cut = folder / f"cut.{kind}"
            cut.write_bytes(whole[: int(share * len(whole))])
            with tally.trial(f"{kind} cut at {share:.0%}"):
                try:
                    assert (read_image(cut) == read_image(folder / f"whole.{kind}")).all(), "a part of the image in silence"
                except BadImage as error:
                    assert cut.name in str(error) and "\n" not in str(error)
    (folder / "empty.png").touch()
    bad("0 bytes", folder / "empty.png", "0 bytes")
    for side in (20_000, 10_000, 8_001):
        (folder / "large.png").write_bytes(png(side, side))
        bad(f"{side} x {side}", folder / "large.png", "pixels")
    others = {
        "svg": b"<svg width='9' height='9'/>", "pdf": b"%PDF-1.7\n", "html": b"<!doctype html>", "text": b"path,label\n",
        "zip": b"PK\3\4" + bytes(40), "elf": b"\x7fELF" + bytes(60), "noise": os.urandom(500),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }  # fmt: skip
    for what, data in others.items():
        (folder / "other.png").write_bytes(data)
        bad(f"{what} as .png", folder / "other.png")
    os.mkfifo(folder / "pipe.png")
    bad("a pipe", folder / "pipe.png", "not a regular file")
    (folder / "loop.png").symlink_to("loop.png")
    bad("a link to itself", folder / "loop.png")
    return tally


def tables(folder: Path, count: int, seed: int) -> Tally:
    """HDF5 with missing keys, wrong types and other lengths; amat with short rows, text, NaN, label 11 and too large values."""
    tally = Tally()

    def opened() -> Dataset:
        return open_dataset(DataOptions("pcam", root=str(folder)))

    def restore() -> None:
        for part in test_pcam.COUNTS:
            for kind, arrays in (("x", test_pcam.X), ("y", test_pcam.Y)):
                test_pcam.write(folder, part, kind, arrays[part])

    wrong: dict[str, tuple[str, object, str]] = {
        "a missing key": ("x", test_pcam.X["valid"], "images"),
        "floats for pixels": ("x", np.zeros((4, 96, 96, 3), np.float32), "x"),
        "text for labels": ("y", np.array([b"a", b"b", b"a", b"b"]), "y"),
        "fewer images than labels": ("x", np.zeros((3, 96, 96, 3), np.uint8), "x"),
        "no image": ("x", np.zeros((0, 96, 96, 3), np.uint8), "x"),
        "other sizes": ("x", np.zeros((4, 32, 32, 3), np.uint8), "x"),
        "label 2": ("y", np.array([0, 1, 2, 1]), "y"),
        "a scalar": ("x", np.uint8(3), "x"),
        "complex numbers": ("x", np.zeros((4, 96, 96, 3), np.complex64), "x"),
    }
    restore()
    with tally.trial("HDF5 as it should be"):
        test_pcam.assert_same(opened())
    for what, (kind, array, key) in wrong.items():
        restore()
        path = test_pcam.write(folder, "valid", kind, array, key=key)
        with tally.trial(f"HDF5 with {what}"), refused(DataError, path):
            opened()
    restore()
    path = test_pcam.path_of(folder, "train", "x")
    for share in (0.0, 0.2, 0.5, 0.9):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        with tally.trial(f"HDF5 cut at {share:.0%}"), refused(DataError, path):
            opened()
        path.write_bytes(whole)
    with h5py.File(path, "w") as file:
        file["x"] = h5py.ExternalLink("/etc/hostname", "x")
    with tally.trial("HDF5 with a link to another file"), refused(DataError, path):
        opened()

    first = (b"1.01", b"nan", b"inf", b"-inf", b"-0.1", b"1e308", b"1e999", b"zero", b"0x1p-2", b"1_0", b"\xff")
    lines: dict[str, Callable[[bytes], bytes]] = {
        **{f"value {value!r}": lambda line, value=value: value + line[line.index(b" ") :] for value in first},
        **{
            f"label {label!r}": lambda line, label=label: line[: line.rindex(b" ")] + b" " + label + b"\n"
            for label in (b"11", b"10", b"-1", b"2.5", b"nan", b"")
        },
        "a short row": lambda line: line[:100] + b"\n",
        "a long row": lambda line: b"0 " + line,
    }
    for what, change in lines.items():
        with tally.trial(f"amat with {what}"), refused(DataError, "some.amat", "line 3"):
            test_amat.read(test_amat.third_line(change))
    with tally.trial("amat with the value 1.0, which is white"):
        values = np.zeros((1, 784))
        values[0, 0] = 1.0
        assert test_amat.read(test_amat.text(values, [1]), 1)[0].flatten()[0] == 255
    return tally


def folders(folder: Path, count: int, seed: int) -> Tally:
    """Empty and read-only folders, links in circles, names that are not UTF-8; what cannot be read is skipped up to 1 %."""
    tally = Tally()

    def classes(name: str, number: int = 3) -> Path:
        for label in ("cat", "dog"):
            (folder / name / label).mkdir(parents=True)
            for i in range(number):
                Image.fromarray(GREY[:8, :8] + np.uint8(i)).save(folder / name / label / f"{i}.png")
        return folder / name

    def opened(root: Path, **options: object) -> Dataset:
        return open_dataset(DataOptions("folder", root=str(root), **options))  # type: ignore[arg-type]

    (folder / "empty").mkdir()
    with tally.trial("an empty folder"), refused(DataError, folder / "empty"):
        opened(folder / "empty")
    with tally.trial("no folder"), refused(DataError, folder / "none"):
        opened(folder / "none")
    root = classes("hollow")
    (root / "owl").mkdir()
    with tally.trial("an empty class"), refused(DataError, root / "owl"):
        opened(root)
    root = classes("circles")
    for name, target in (("again", root), ("self", "self"), ("up", "..")):
        (root / "cat" / name).symlink_to(target)
    with tally.trial("links in circles below a class"):
        assert sum(len(opened(root).split(part)) for part in ("train", "val", "test")) == 6
    (root / "everything").symlink_to(root)
    with tally.trial("a class that is a link back"), refused(DataError, root / "everything"):
        opened(root)
    root = classes("bytes")
    os.rename(root / "cat" / "0.png", os.fsencode(root / "cat") + b"/caf\xe9\n.png")
    os.rename(root / "dog", os.fsencode(root) + b"/do\xffg")
    with tally.trial("names that are not UTF-8"):
        data = opened(root)
        names = [data.split(part).name(i) for part in ("train", "val", "test") for i in range(len(data.split(part)))]
        assert len(names) == 6 and "\\xe9" in "".join(names) and "do\\xffg" in data.spec.classes
        assert all(name.isprintable() and name.encode() for name in names)
    root = classes("readonly")
    for path in (*root.rglob("*"), root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with tally.trial("a read-only folder"):
        assert len(opened(root).train) >= 2
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)

    root = classes("skipped", 100)
    for bad, allowed in ((1, True), (2, True), (3, False)):
        (root / "cat" / f"{bad}.png").write_bytes(b"no image")
        with tally.trial(f"one bad image of 200 stops ({bad})"), refused(BadImage, "cat", f"{bad} of 200", "--on-bad skip"):
            opened(root)
        with tally.trial(f"{bad} bad images of 200 with --on-bad skip"):
            if allowed:
                assert len(opened(root, on_bad="skip").skipped) == bad
            else:
                with refused(DataError, "3 of 200", "more than the 0.01", "--data.max_bad"):
                    opened(root, on_bad="skip")
    data = opened(root, on_bad="skip", max_bad=0.1, memory_gb=0)  # files are read when they are needed
    spoilt = range(4)
    for i in spoilt:
        Path(data.train.name(i)).write_bytes(b"\x89PNG")
    for allowed in (0.01, 0.1):
        with tally.trial(f"4 images spoilt after the look, at most {allowed:.0%}"):
            batches = EvalLoader(data.train, data.spec, batch_size=16, reading=Reading(on_bad="skip", max_bad=allowed))
            if allowed == 0.1:
                skipped = [name for batch in batches for name, _ in batch.bad]
                assert sorted(skipped) == sorted(data.train.name(i) for i in spoilt)
            else:
                with refused(DataError, "images cannot be read", "--data.max_bad"):
                    list(batches)
    return tally


def noise(folder: Path, count: int, seed: int) -> Tally:
    """Image files with bytes changed at random: an array or a named error, nothing else."""
    tally, generator = Tally(), np.random.default_rng(seed)
    wholes = {}
    for kind in ("png", "jpg", "gif", "webp", "bmp", "tif", "ppm"):
        buffer = io.BytesIO()
        Image.fromarray(COLOUR).save(buffer, format={"jpg": "jpeg", "tif": "tiff"}.get(kind, kind))
        wholes[kind] = buffer.getvalue()
    for trial in range(count):
        kind = list(wholes)[trial % len(wholes)]
        data = np.frombuffer(wholes[kind], np.uint8).copy()
        hit = generator.integers(0, len(data), generator.integers(1, 9))
        data[hit] = generator.integers(0, 256, len(hit))
        path = folder / f"noise.{kind}"
        path.write_bytes(data.tobytes())
        with tally.trial(f"{kind}, trial {trial}"):
            try:
                assert read_image(path).ndim == 3
            except BadImage as error:
                assert path.name in str(error) and "\n" not in str(error)
    return tally
