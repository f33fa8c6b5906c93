"""2. Hostile files: damaged, foreign or crafted ones end in a named error; none is loaded in silence, none runs code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState

from revit.cli.model_files import ModelFileError, ScriptModel
from revit.data.arrays import read_npz
from revit.data.cifar_batches import read_pickled
from revit.data.image_files import read_image
from revit.data.spec import DataError
from revit.training.checkpoint import CheckpointError, read_checkpoint, read_latest
from revit.training.loop import TrainingError
from tests.data.test_archives import make_tar
from tests.data.test_cifar_batches import hostile as pickle_payloads
from tests.faults.cases import number_of, write
from tests.faults.tally import Tally, refused
from tests.training.runs import make_training

MB = 2**20


def truncations(folder: Path, count: int, seed: int) -> Tally:
    """A file of a checkpoint is cut at a random place: it is named, and the checkpoint before is taken."""

    def cut(content: bytearray, generator: random.Random) -> bytearray:
        return content[: generator.randrange(len(content))]

    return _damaged(folder, count, seed, cut)


def bit_flips(folder: Path, count: int, seed: int) -> Tally:
    """One bit of a file of a checkpoint is turned over: it is named, and the checkpoint before is taken."""

    def flip(content: bytearray, generator: random.Random) -> bytearray:
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        return content

    return _damaged(folder, count, seed, flip)


def _damaged(folder: Path, count: int, seed: int, damage: Callable[[bytearray, random.Random], bytearray]) -> Tally:
    tally, generator, last = Tally(), random.Random(seed), folder / "last"
    write(last, 1)
    write(last, 2)
    whole = {path: path.read_bytes() for path in sorted(last.iterdir())}
    for trial in range(count):
        path = generator.choice(list(whole))  # each file as often: the small ones would hardly be hit by their size
        path.write_bytes(damage(bytearray(whole[path]), generator))
        with tally.trial(f"{path.name}, trial {trial}"), refused(CheckpointError, last):
            read_checkpoint(last)
        with tally.trial(f"the one before, {path.name}, trial {trial}"):
            assert number_of(read_latest(last)) == 1
        path.write_bytes(whole[path])
    assert number_of(read_checkpoint(last)) == 2
    return tally


def sign(folder: Path, name: str, content: bytes) -> None:
    """Puts a file into a checkpoint with a manifest that vouches for it, as whoever makes one can."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def wrong_contents(folder: Path, count: int, seed: int) -> Tally:
    """Whole checkpoints with the wrong things in them: nothing, other shapes, another group, weights that are no numbers."""
    from safetensors.torch import load, save

    tally, last = Tally(), folder / "last"
    files = ("model.safetensors", "trainer.safetensors", "config.json", "trainer.json", "manifest.json")
    for name in files:
        for content in (b"", b"null", b"[]", b"[" * 100_000, b"\0" * 64, b"{}"):
            write(last, 1)
            if name == "manifest.json":
                (last / name).write_bytes(content)
            else:
                sign(last, name, content)
            if content == b"{}" and name in ("config.json", "trainer.json"):
                continue  # an object, as it should be: what is missing in it is noticed when it is used
            with tally.trial(f"{name} with {content[:4]!r}"), refused(CheckpointError, last):
                read_checkpoint(last)
    for value in (np.nan, np.inf, -np.inf):
        for name in files[:2]:
            write(last, 1)
            tensors = load((last / name).read_bytes())
            next(tensor for tensor in tensors.values() if tensor.is_floating_point())[3, 4] = value
            sign(last, name, save(tensors))
            with tally.trial(f"{value} in {name}"), refused(CheckpointError, "not finite numbers"):
                read_checkpoint(last)
        with tally.trial(f"saving {value}"), refused(CheckpointError, "the last good checkpoint is kept"):
            from revit.training.checkpoint import write_checkpoint

            write_checkpoint(last, model={"w": torch.tensor([value])}, config={}, trainer={}, state={})
    run = folder / "run"
    make_training(run, epochs=1).run()
    AcceleratorState._reset_state(reset_partial_state=True)
    others: dict[str, dict[str, Any]] = {"dims": {"dims": 8}, "group": {"group": "p4m"}, "depths": {"depths": 2}}
    for what, model in others.items():
        with tally.trial(f"weights of other {what}"), refused(TrainingError, run, "of another model or version"):
            make_training(run, model=model).resume()
        AcceleratorState._reset_state(reset_partial_state=True)
    with tally.trial("a group of the same order"), refused(TrainingError, run, "of another model or version"):
        training = make_training(run)
        training.config["recipe"]["model"]["group"] = "z2m"
        training.resume()
    AcceleratorState._reset_state(reset_partial_state=True)
    return tally


class Runs:
    """An object whose pickle runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def pickles(folder: Path, count: int, seed: int) -> Tally:
    """Payloads that make a canary file if anything unpickles them, at every door that takes files: none is made."""
    tally, canary = Tally(), folder / "canary"
    payloads = dict(pickle_payloads(canary))
    with tally.trial("the payloads work where they are let in"):
        pickle.loads(payloads["os.system"])
        assert canary.exists()
        canary.unlink()
    evil = Runs(f"touch {canary}")
    for name, legacy in (("torch zip", False), ("torch legacy", True)):
        buffer = io.BytesIO()
        torch.save({"w": evil}, buffer, _use_new_zipfile_serialization=not legacy)
        payloads[name] = buffer.getvalue()
    payloads["nested zip"] = _zipped({"archive/data.pkl": payloads["os.system"], "archive/version": b"3\n"})
    payloads["legacy tar"] = make_tar(
        folder / "legacy.tar", ("sys_info", pickle.dumps({})), ("pickle", payloads["os.system"]), ("tensors", b""), mode="w"
    ).read_bytes()
    objects = io.BytesIO()
    np.save(objects, np.array([evil], dtype=object), allow_pickle=True)
    payloads["object array"] = objects.getvalue()
    doors: dict[str, Callable[[bytes], object]] = {
        "model.safetensors": lambda data: _as_checkpoint(folder, "model.safetensors", data),
        "trainer.safetensors": lambda data: _as_checkpoint(folder, "trainer.safetensors", data),
        "trainer.json": lambda data: _as_checkpoint(folder, "trainer.json", data),
        ".npz member": lambda data: read_npz(_file(folder / "a.npz", _zipped({"train_images.npy": data}))),
        ".npz": lambda data: read_npz(_file(folder / "b.npz", data)),
        "image.npy": lambda data: read_image(_file(folder / "a.npy", data)),
        "image.png": lambda data: read_image(_file(folder / "a.png", data)),
        "TorchScript": lambda data: ScriptModel(_file(folder / "model.pt", data)),
        "CIFAR batch": lambda data: read_pickled(data, "data_batch_1", 4),
    }
    for name, payload in payloads.items():
        for door, knock in doors.items():
            with tally.trial(f"{name} as {door}"):
                with refused((CheckpointError, DataError, ModelFileError)):
                    knock(payload)
                assert not canary.exists(), "the payload ran"
    return tally


def _as_checkpoint(folder: Path, name: str, data: bytes) -> None:
    write(folder / "last", 1)
    sign(folder / "last", name, data)
    read_checkpoint(folder / "last")


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _headers() -> Iterator[tuple[str, bytes]]:
    """safetensors files with headers that lie."""

    def file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

    for power in (24, 27, 31, 40, 62, 63):
        yield f"a header of 2^{power} bytes that is not there", file({"w": tensor([1], 0, 4)}, bytes(4), 2**power)
    yield "a header of 12 MB", file(b"{" + b" " * 12 * MB + b"}")
    many = {f"t{i}": tensor([], 0, 0, "U8") for i in range(200_000)}
    yield "200,000 tensors", file(many)
    yield "deep nesting", file(b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    yield "overlapping tensors", file({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12))
    yield "the same bytes twice", file({"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)}, bytes(8))
    yield "a gap", file({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, bytes(12))
    yield "bytes behind the last tensor", file({"a": tensor([1], 0, 4)}, bytes(400))
    yield "offsets behind the end", file({"a": tensor([1000], 0, 4000)}, bytes(4))
    yield "offsets backwards", file({"a": tensor([1], 4, 0)}, bytes(4))
    yield "negative offsets", file({"a": tensor([1], -4, 0)}, bytes(4))
    for shape in ([2**40], [2**62, 4], [2**32, 2**32], [2**63], [10**12, 0, 10**12, 1], [-1], [-2, -2]):
        yield f"shape {shape}", file({"a": tensor(shape, 0, 16)}, bytes(16))
    yield "unknown type", file({"a": tensor([1], 0, 4, "F31")}, bytes(4))
    yield "no shape", file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4))
    yield "not an object", file([1, 2, 3], bytes(4))
    yield "not UTF-8", file(b'{"\xff\xfe": 1}', bytes(4))


def safetensors_headers(folder: Path, count: int, seed: int) -> Tally:
    """Header bombs, overlaps, huge shapes, signed by a manifest: refused in under a second and 200 MB of memory."""
    tally, places = Tally(), {}
    for what, content in _headers():
        places[what] = folder / f"{len(places)}"
        write(places[what], 1)
        sign(places[what], "model.safetensors", content)
    places["a sparse file of 6 GB"] = sparse = folder / "sparse"
    write(sparse, 1)
    with open(sparse / "model.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", 5 * 2**30))
        file.truncate(6 * 2**30)
    found = _in_200_mb({what: lambda place=place: read_checkpoint(place) for what, place in places.items()})
    for what in places:
        with tally.trial(what):
            assert found.get(what) == "refused", found.get(what, "the process died before")
    return tally


def _in_200_mb(reads: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What came of each in a process that has 200 MB more than this one: "refused" if that took less than a second."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 200 * MB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            for what, read in reads.items():
                begin = time.process_time()
                try:
                    with refused(CheckpointError):
                        read()
                    seconds = time.process_time() - begin
                    result = "refused" if seconds < 1 else f"{seconds:.1f} seconds"
                except BaseException as error:
                    result = f"{type(error).__name__}: {error}"[:200]
                os.write(send, json.dumps([what, result]).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(send)
    with open(receive, "rb") as lines:
        results = dict(json.loads(line) for line in lines)
    os.waitpid(child, 0)
    return results
