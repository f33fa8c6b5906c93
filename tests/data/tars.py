"""Archives for tests: samples written with Python's own tarfile."""

import io
import tarfile

import numpy as np
from PIL import Image


def png(level, size=(8, 8)):
    pixels = np.random.Generator(np.random.PCG64(level)).integers(level, level + 50, (*size, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def write_tar(path, members, **options):
    """`members` are pairs of a name and bytes, or `TarInfo` objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for member in members:
            info, data = (member, b"") if isinstance(member, tarfile.TarInfo) else (tarfile.TarInfo(member[0]), member[1])
            info.size = len(data) or info.size
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(first, count, classes=("cat", "dog")):
    return [
        member
        for i in range(first, first + count)
        for member in ((f"{i:04}.png", png(i % 200)), (f"{i:04}.cls", classes[i % len(classes)].encode()))
    ]


def write_shards(root, archives=20, each=5):
    """`train-000000.tar` to ..., of two classes."""
    for k in range(archives):
        write_tar(root / f"train-{k:06}.tar", samples(k * each, each))
    return root
