"""6. Load: ten thousand forwards, fifty thousand images with bad ones among them, the same run twice."""

from __future__ import annotations

import csv
import json
import random
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from revit import create_model
from tests.cli.conftest import write_npz
from tests.faults import victims
from tests.faults.cases import RUNS, assert_same_run
from tests.faults.numbers import MODELS
from tests.faults.tally import Tally

MAX_GROWTH = 0.01
SIZES = ((16, 16), (24, 16), (32, 32))  # what is kept for a size must not be kept for each image


def resident(process: int | str = "self") -> int:
    """Pages of memory that a process has."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1])


def forwards(folder: Path, count: int, seed: int) -> Tally:
    """Ten thousand forwards, two models and three sizes in turn: the same answer each time, memory grows by less than 1 %."""
    tally, result = Tally(), folder / "forwards.json"
    process = victims.start(victims.call, __name__, "count_forwards", str(result), count, seed)
    process.join()
    with tally.trial("the process"):
        assert process.exitcode == 0, Path(f"{result}.log").read_text()[-600:]
        found = json.loads(result.read_text())
        for number in range(count):
            with tally.trial(f"forward {number}"):
                assert number not in found["changed"], "another answer"
        before, after = found["resident"]
        with tally.trial("memory"):
            assert after <= (1 + MAX_GROWTH) * before, f"{before:,} pages before, {after:,} after"
    return tally


def count_forwards(result: str, count: int, seed: int) -> None:
    """Writes which forwards had another answer than the first one of their kind, and the memory before and after."""
    torch.manual_seed(seed)
    models = [create_model(name, group="p4", in_chans=3, num_classes=4, **options).eval() for name, options in MODELS.items()]
    cases = [(model, torch.randn(2, 3, *size)) for size in SIZES for model in models]
    with torch.no_grad():
        first = [model(x) for model, x in cases]
        for number in range(10 * len(cases)):  # the pools of the allocator fill
            model, x = cases[number % len(cases)]
            model(x.clone())
        before, changed = resident(), []
        for number in range(count):
            model, x = cases[number % len(cases)]
            if not torch.equal(model(x), first[number % len(cases)]):
                changed.append(number)
    Path(result).write_text(json.dumps({"changed": changed, "resident": [before, resident()]}))


def predictions(folder: Path, count: int, seed: int) -> Tally:
    """`revit predict`, 0.2 % of the images corrupt: the good predicted once, the bad listed, memory flat; twice the same."""
    tally, generator = Tally(), random.Random(seed)
    process = victims.start(victims.command, [*write_npz(folder), "--out", "run"], str(folder))
    process.join()
    bad = _write_images(folder / "images", count, generator)
    tables = []
    for name in ("first.csv", "second.csv"):
        words = ["predict", "images", "--run", "run", "--out", name, "--on-bad", "skip"]
        process = victims.start(victims.command, words, str(folder))
        grown = _growth(process, folder / f"{name}.partial")
        with tally.trial(f"{name}, the process"):
            assert process.exitcode == 0, (folder / "out.txt").read_text()[-300:]
        if count >= 10_000:  # a short run has hardly begun when it ends
            with tally.trial(f"{name}, memory"):
                assert grown <= MAX_GROWTH, f"grew by {grown:.1%}"
        tables.append([(folder / f"{name}{end}").read_bytes() for end in ("", ".skipped.csv")])
    rows = list(csv.DictReader(tables[0][0].decode().splitlines()))
    listed = {row["path"]: row["reason"] for row in csv.DictReader(tables[0][1].decode().splitlines())}
    times: dict[str, int] = {}
    for row in rows:
        times[row["path"]] = times.get(row["path"], 0) + 1
    for path in sorted((folder / "images").rglob("*.png")):
        name = str(path.relative_to(folder))
        with tally.trial(name):
            assert (times.get(name, 0), bool(listed.get(name))) == ((0, True) if path in bad else (1, False))
    with tally.trial("nothing else"):
        assert len(rows) + len(listed) == count
    with tally.trial("the same bytes twice"):
        assert tables[0] == tables[1]
    return tally


def _write_images(folder: Path, count: int, generator: random.Random) -> set[Path]:
    """Small PNG files, a thousand in a folder; returns those that are corrupt: 0.2 %, at least three."""
    pixels = np.random.default_rng(generator.randrange(2**32)).integers(0, 256, (count, 8, 8), dtype=np.uint8)
    paths = [folder / f"{number // 1000}" / f"{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        Image.fromarray(pixels[number]).save(path, compress_level=1)
    bad = generator.sample(paths, max(3, count // 500))
    for number, path in enumerate(bad):
        whole = path.read_bytes()
        path.write_bytes((b"", whole[: len(whole) // 2], b"no image", whole[:20] + b"\xff\xff" + whole[22:])[number % 4])
    return set(bad)


def _growth(process: BaseProcess, table: Path) -> float:
    """How much more memory the process had at most than when a tenth of its time was over, looked at until it ends."""
    seen: list[int] = []
    while process.is_alive():
        if table.exists():
            seen.append(resident(process.pid or "self"))
        process.join(0.05)
    early = max(seen[: max(1, len(seen) // 10)], default=1)
    return max(seen, default=1) / early - 1


def same_seeds(folder: Path, count: int, seed: int) -> Tally:
    """Two runs with the same seed, in processes of their own: weights, optimiser and history are the same bits."""
    tally = Tally()
    for trial in range(count):
        case = {**RUNS[trial % len(RUNS)], "seed": seed + trial}
        one, two = folder / f"one{trial}", folder / f"two{trial}"
        with tally.trial(f"{case}"):
            processes = [victims.start(victims.train, str(path), case, False) for path in (one, two)]
            for process in processes:
                process.join()
                assert process.exitcode == 0
            assert_same_run(one, two)
        for path in (one, two):
            shutil.rmtree(path, ignore_errors=True)
    return tally
