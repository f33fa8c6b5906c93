"""5. The machine: full disks, missing permissions, folders that vanish, signals, two runs in one folder, broken workers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from revit.data import DataError, workers
from revit.data.loader import EvalLoader, Reading, TrainLoader
from revit.training.checkpoint import CheckpointError, read_checkpoint, read_latest
from tests.cli.conftest import write_npz
from tests.data.test_loader import SPEC
from tests.data.test_workers import Faulty, die, fail, hang
from tests.faults import sabotage, victims
from tests.faults.cases import number_of, write
from tests.faults.tally import Tally, refused

LONG = ["--train.epochs", "5000", "--train.save_seconds", "0.1"]


@contextmanager
def started(folder: Path, *more: str, out: str = "run", before: str = "") -> Iterator[BaseProcess]:
    """`revit train` on toy images in a process of its own, in `folder`; whatever happens, it ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    process = victims.start(victims.command, [*write_npz(folder), "--out", out, *more], str(folder), before)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ended(process: BaseProcess, folder: Path, code: int, *words: str) -> str:
    """What it printed, once it has ended as it should: with this code, without a traceback."""
    process.join(120)
    text = (folder / "out.txt").read_text()
    assert process.exitcode == code, f"exit code {process.exitcode}: {text[-300:]}"
    assert "Traceback" not in text, text[-600:]
    missing = [word for word in words if word not in " ".join(text.split())]
    assert not missing, f"{missing} not in {text[-200:]!r}"
    return text


def under_way(process: BaseProcess, folder: Path) -> None:
    victims.wait_for((folder / "run" / "results.csv").exists, process)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path | None]:
    """A file system in memory of this size, or nothing where it cannot be mounted."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disks(folder: Path, count: int, seed: int) -> Tally:
    """The disk fills up at a random moment of a save or of a run: the error says so and the last good checkpoint is there."""
    tally, generator = Tally(), random.Random(seed)
    with small_disk(folder / "disk", 200) as disk:
        for trial in range(count if disk else 0):
            assert disk is not None
            last = disk / "last"
            with tally.trial(f"save, trial {trial}"):
                write(last, trial)
                filler = disk / "filler"
                room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                filler.write_bytes(bytes(max(0, room - generator.randrange(60_000))))
                with refused(CheckpointError, "No space left on device", "the last good checkpoint is kept"):
                    write(last, trial + 1)
                filler.unlink()
                assert number_of(read_checkpoint(last)) == trial
                shutil.rmtree(disk / "last")
                shutil.rmtree(disk / ".last.previous", ignore_errors=True)
    with tally.trial("files that may not grow"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sabotage.small_files()
                with refused(CheckpointError, "File too large", "the last good checkpoint is kept"):
                    write(folder / "limited", 1)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not (folder / "limited").exists()
    for trial in range(max(1, count // 10)):
        place = folder / f"run{trial}"
        with small_disk(place, 600) as disk:
            if disk is None:
                break  # not tried, not counted
            with tally.trial(f"a whole run, trial {trial}"):
                with started(disk, *LONG) as process:
                    under_way(process, disk)
                    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                    (disk / "filler").write_bytes(bytes(max(0, room - generator.randrange(40_000))))
                    ended(process, disk, 2, "No space left on device")
                read_latest(disk / "run" / "checkpoints" / "last")
    return tally


def permissions(folder: Path, count: int, seed: int) -> Tally:
    """A place that may not be written to, from the start or all of a sudden."""
    tally = Tally()
    place = folder / "start"
    (place / "locked").mkdir(parents=True)
    (place / "locked").chmod(0o555)
    with tally.trial("from the start"), started(place, out="locked/run", before="obey_permissions") as process:
        ended(process, place, 2, "locked", "cannot be written (Permission denied); choose another --out")
    place = folder / "later"
    with tally.trial("all of a sudden"), started(place, *LONG, before="obey_permissions") as process:
        under_way(process, place)
        (place / "run" / "checkpoints").chmod(0o555)
        ended(process, place, 2, "cannot be saved (Permission denied); the last good checkpoint is kept")
        read_latest(place / "run" / "checkpoints" / "last")
    for path in (folder / "start" / "locked", folder / "later" / "run" / "checkpoints"):
        path.chmod(0o755)
    return tally


def vanishing(folder: Path, count: int, seed: int) -> Tally:
    """The run folder is moved away or removed: the run says so, and its state is saved where the folder was."""
    tally, generator = Tally(), random.Random(seed)
    for trial in range(count):
        place = folder / f"vanish{trial}"
        with tally.trial(f"trial {trial}"), started(place, *LONG) as process:
            under_way(process, place)
            time.sleep(generator.uniform(0, 0.5))
            (place / "run").rename(place / "moved")
            if trial % 2:
                shutil.rmtree(place / "moved")
            else:
                read_latest(place / "moved" / "checkpoints" / "last")
            ended(process, place, 2, "run: vanished while the run was using it", "--resume goes on")
            state = read_checkpoint(place / "run" / "checkpoints" / "last").state
            assert state["epoch"] >= 1 and (place / "run" / "config.yaml").exists()
    return tally


def signals(folder: Path, count: int, seed: int) -> Tally:
    """Ctrl-C once and twice, SIGTERM: the exit code that shells expect, a whole checkpoint, no traceback."""
    tally, generator = Tally(), random.Random(seed)
    kinds: list[tuple[str, list[int], set[int]]] = [
        ("Ctrl-C twice", [signal.SIGINT] * 2, {130}),
        ("Ctrl-C", [signal.SIGINT], {130}),
        ("SIGTERM", [signal.SIGTERM], {143}),
        ("SIGTERM twice", [signal.SIGTERM] * 2, {143, -signal.SIGTERM}),
    ]
    for trial in range(count):
        what, numbers, codes = kinds[trial % len(kinds)]
        place = folder / f"signal{trial}"
        with tally.trial(f"{what}, trial {trial}"), started(place, *LONG) as process:
            under_way(process, place)
            for number in numbers:
                time.sleep(generator.uniform(0, 0.1))
                if process.is_alive() and process.pid is not None:
                    with suppress(ProcessLookupError):  # it has ended since
                        os.killpg(process.pid, number)
            process.join(120)
            text = (place / "out.txt").read_text()
            assert process.exitcode in codes, f"exit code {process.exitcode}: {text[-300:]}"
            assert "Traceback" not in text, text[-600:]
            assert len(numbers) > 1 or "train run --resume" in text, text[-300:]
            state = read_latest(place / "run" / "checkpoints" / "last").state
            assert state["epoch"] >= 1
    return tally


def two_runs(folder: Path, count: int, seed: int) -> Tally:
    """A second run in the same folder is refused by name; when its owner was killed, it is taken over."""
    tally = Tally()
    for trial in range(count):
        place = folder / f"two{trial}"
        with started(place, *LONG) as owner:
            under_way(owner, place)
            with tally.trial(f"a second run, trial {trial}"), started(place, *LONG, "--resume") as second:
                ended(second, place, 2, f"in use by process {owner.pid}")
            owner.kill()
            owner.join()
        (place / "out.txt").unlink()
        before = _progress(place)
        with tally.trial(f"a dead owner, trial {trial}"), started(place, *LONG, "--resume") as heir:
            victims.wait_for(lambda place=place, before=before: _progress(place) > before, heir)
            assert heir.pid is not None
            os.killpg(heir.pid, signal.SIGTERM)
            ended(heir, place, 143, "resuming in epoch")
    return tally


def _progress(place: Path) -> tuple[int, int]:
    state = read_latest(place / "run" / "checkpoints" / "last").state
    return state["epoch"], state["step"]


def broken_workers(folder: Path, count: int, seed: int) -> Tally:
    """A worker is killed, raises or hangs: an error in less than 60 seconds that names the sample."""
    tally, generator = Tally(), random.Random(seed)
    faults: list[tuple[str, Callable[[], Any], str]] = [
        ("raises", fail, "reading it failed (IndexError"),
        ("is killed", die, "a process that reads images died"),
        ("hangs", hang, "no image was read for"),
    ]
    for trial in range(count):
        what, fault, words = faults[trial % 3]
        sample, number = generator.randrange(50), generator.choice([1, 2])
        images, reading = Faulty(fault, sample), Reading(workers=number)
        with tally.trial(f"a worker of {number} {what}, sample {sample}"):
            begin = time.monotonic()
            with refused(DataError, f"toy/train/{sample}", words):
                if trial % 2:
                    list(EvalLoader(images, SPEC, batch_size=8, reading=reading))
                else:
                    list(TrainLoader(images, SPEC, batch_size=8, reading=reading).batches(0))
            assert time.monotonic() - begin < 60, f"{time.monotonic() - begin:.0f} seconds"
    return tally


@contextmanager
def impatient() -> Iterator[None]:
    """Workers are looked at more often, so that the quick tests need not wait for 45 seconds."""
    before = workers.LOOK_SECONDS, workers.MAX_LOOKS
    workers.LOOK_SECONDS, workers.MAX_LOOKS = 0.3, 4
    try:
        yield
    finally:
        workers.LOOK_SECONDS, workers.MAX_LOOKS = before
