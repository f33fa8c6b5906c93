"""5. Two processes: one of them is killed, batches that do not divide, another number of processes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from revit.training.checkpoint import read_checkpoint
from tests.cli.conftest import write_npz
from tests.faults import victims
from tests.faults.cases import assert_same_run
from tests.faults.machine import ended
from tests.faults.tally import Tally

MAX_SECONDS = 90
AGENT = re.compile(r"[DIWE]\d{4} ")  # how lines of torchrun's own log begin
OPTIONS = ["--train.epochs", "6", "--train.save_seconds", "0.05", "--train.ema", "0.9"]
EXACT = ["--train.precision", "float64", "--model.norm", "layer", "--train.epochs", "2"]


@contextmanager
def ranks(folder: Path, count: int, *more: str) -> Iterator[BaseProcess]:
    """`torchrun --nproc_per_node COUNT -m revit train ...` on toy images in `folder`; all its processes end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("rank*.pid"):
        path.unlink()
    process = victims.start(victims.ranks, count, [*write_npz(folder), "--out", "run", *more], str(folder), _free_port())
    try:
        yield process
    finally:
        for pid in (*_pids(folder), process.pid):
            if pid is not None and _lives(pid):
                os.kill(pid, signal.SIGKILL)
        process.join()


def killed_ranks(folder: Path, count: int, seed: int) -> Tally:
    """One of two processes is killed at a random moment: both end in less than 90 seconds, a restart gives the same bits."""
    tally, generator = Tally(), random.Random(seed)
    with ranks(folder / "whole", 2, *OPTIONS) as process:
        begin = _under_way(process, folder / "whole", 2)
        process.join()
        duration = time.monotonic() - begin
        ended(process, folder / "whole", 0)
    for trial in range(count):
        place, rank = folder / f"killed{trial}", trial % 2
        with tally.trial(f"process {rank}, trial {trial}"):
            seconds = generator.uniform(0, 0.9) * duration
            while not _kill_one(place, rank, seconds):  # faster than the first run: it had ended before
                shutil.rmtree(place)
                seconds /= 2
            with ranks(place, 2, *OPTIONS, "--resume") as process:
                process.join(300)
                assert process.exitcode == 0, (place / "out.txt").read_text()[-600:]
            assert_same_run(folder / "whole" / "run", place / "run")
    return tally


def _kill_one(place: Path, rank: int, seconds: float) -> bool:
    """Kills one of two processes so many seconds after they began, and sees that the other one ends; False if it had ended."""
    with ranks(place, 2, *OPTIONS) as process:
        _under_way(process, place, 2)
        time.sleep(seconds)
        pids = _pids(place)
        if not _lives(pids[rank]):
            return False
        os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        while any(map(_lives, pids)) and time.monotonic() - killed < MAX_SECONDS:
            time.sleep(0.05)
        assert not any(map(_lives, pids)), f"a process lives {MAX_SECONDS} seconds after the other was killed"
        process.join(30)
        assert process.exitcode not in (None, 0), "nobody was told"
        return True


def uneven_batches(folder: Path, count: int, seed: int) -> Tally:
    """Batches and parts of them that two processes cannot share evenly: the same run as one process, no image twice."""
    tally = Tally()
    for batch in (5, 7, 33)[:count]:
        options = [*EXACT, "--train.batch_size", str(batch)]
        for processes in (1, 2):
            with ranks(folder / f"{batch}of{processes}", processes, *options) as process:
                process.join(300)
        with tally.trial(f"batches of {batch}"):
            one, two = (folder / f"{batch}of{processes}" / "run" for processes in (1, 2))
            first, second = (read_checkpoint(path / "checkpoints" / "last") for path in (one, two))
            for name, tensor in first.model.items():
                assert torch.allclose(tensor, second.model[name], atol=1e-8), f"{name} differs"
            for mine, theirs in zip(first.state["history"], second.state["history"], strict=True):
                for column in ("train_loss", "val_loss", "val_accuracy"):
                    assert abs(mine[column] - theirs[column]) < 1e-8, f"{column}: {mine[column]} and {theirs[column]}"
            assert '"images": 21' in (two / "test.json").read_text()
    return tally


def other_numbers(folder: Path, count: int, seed: int) -> Tally:
    """A run goes on with another number of processes only if that is allowed by name."""
    tally = Tally()
    for before, after in ((2, 1), (1, 2)):
        place = folder / f"{before}to{after}"
        with ranks(place, before, *OPTIONS, "--train.epochs", "1") as process:
            process.join(300)
        more = [*OPTIONS, "--train.epochs", "2", "--resume", "--allow-change"]
        with tally.trial(f"{before}, then {after}"), ranks(place, after, *more, "train.epochs") as process:
            process.join(300)
            ours = [line for line in (place / "out.txt").read_text().splitlines() if not AGENT.match(line)]
            text = " ".join(" ".join(ours).split())
            assert process.exitcode not in (None, 0) and "Traceback" not in text, text[-600:]
            assert f"processes ({before}, now {after})" in text and "--allow-change processes" in text, text[-600:]
        with tally.trial(f"{before}, then {after}, by name"), ranks(place, after, *more, "train.epochs,processes") as process:
            process.join(300)
            assert process.exitcode == 0, (place / "out.txt").read_text()[-600:]
            assert read_checkpoint(place / "run" / "checkpoints" / "last").state["epoch"] == 2
    return tally


def _under_way(process: BaseProcess, folder: Path, count: int) -> float:
    """When all processes had begun."""
    victims.wait_for(lambda: len(_pids(folder)) == count, process)
    return time.monotonic()


def _pids(folder: Path) -> list[int]:
    return [int(path.suffixes[0][1:]) for path in sorted(folder.glob("rank*.pid"))]


def _lives(pid: int) -> bool:
    """Whether a process is there and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
