"""A checkpoint is whole or not there, whenever its process dies; a damaged one is named, never loaded."""

import errno
import json
import os
import random
import signal
import time

import pytest

from revit import weight_files as module
from revit.training.checkpoint import CheckpointError, read_checkpoint, read_latest
from tests.training.checkpoints import number_of, write


def test_round_trip_and_the_one_before_is_kept(tmp_path):
    folder = tmp_path / "checkpoints" / "last"
    for number in range(3):
        write(folder, number)
    assert number_of(read_checkpoint(folder)) == 2
    assert number_of(read_checkpoint(folder.with_name(".last.previous"))) == 1
    assert sorted(entry.name for entry in folder.parent.iterdir()) == [".last.previous", "last"]


def test_fifty_kills_while_saving_leave_a_whole_checkpoint(tmp_path):
    folder, generator, done = tmp_path / "last", random.Random(0), 0
    begin = time.monotonic()
    write(folder, 0)
    duration = time.monotonic() - begin
    for _ in range(50):
        ready, started = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(started, b"!")
            number = done
            while True:
                number += 1
                write(folder, number)
        os.read(ready, 1)
        time.sleep(generator.uniform(0, 4) * duration)  # in every phase of a save
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        number = number_of(read_checkpoint(folder))  # `last` itself, without any repair
        assert number >= done
        done = number
    assert done > 10
    write(folder, done + 1)  # what the killed ones left behind is not in the way
    assert number_of(read_checkpoint(folder)) == done + 1


@pytest.mark.parametrize("moment", range(3))
def test_file_systems_without_exchange(tmp_path, monkeypatch, moment):
    """Two renames instead of one: a death before, between and after them loses nothing."""
    folder = tmp_path / "last"
    write(folder, 0)

    class NoExchange:
        def renameat2(self, *arguments):
            module.ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(module.ctypes, "CDLL", lambda *a, **k: NoExchange())
    write(folder, 1)
    assert number_of(read_checkpoint(folder)) == 1
    rename, calls = type(folder).rename, []

    def dying(self, target):
        if len(calls) == moment:
            raise KeyboardInterrupt
        calls.append(target)
        return rename(self, target)

    monkeypatch.setattr(type(folder), "rename", dying)
    if moment < 2:
        with pytest.raises(KeyboardInterrupt):
            write(folder, 2)
    else:
        write(folder, 2)
    monkeypatch.setattr(type(folder), "rename", rename)
    assert number_of(read_latest(folder)) >= 1
    write(folder, 3)
    assert number_of(read_checkpoint(folder)) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer.safetensors", "trainer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_damage_is_named_and_the_one_before_is_taken(tmp_path, name, damage):
    folder = tmp_path / "last"
    write(folder, 1)
    write(folder, 2)
    file = folder / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(file if name != "manifest.json" else folder)):
        read_checkpoint(folder)
    assert number_of(read_latest(folder)) == 1


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        read_checkpoint(tmp_path / "none")


def test_a_manifest_cannot_name_other_files(tmp_path):
    folder = tmp_path / "last"
    write(folder, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["../../secret"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not the manifest of a checkpoint"):
        read_checkpoint(folder)


def test_full_disk_keeps_the_last_good_one(tmp_path, monkeypatch):
    folder = tmp_path / "last"
    write(folder, 1)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device.; the last good checkpoint is kept"):
        write(folder, 2)
    monkeypatch.undo()
    assert number_of(read_checkpoint(folder)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
