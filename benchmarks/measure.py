"""How things are measured: interleaved timing, fresh processes, and what the machine was."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from revit.evaluation.memory import Task
from revit.evaluation.memory import peak_memory as peak_memory

THREADS = 2
QUIET, PATIENCE = 0.15, 10.0  # below this share of the processors others are quiet; seconds to wait for that
HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "pictures"
TAKEN = "seconds:"
"""What a server prints before its answers: libraries may print too."""
STAT, CPU_INFO = Path("/proc/stat"), Path("/proc/cpuinfo")


S = TypeVar("S")
T = TypeVar("T")


def timed(task: Task) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def interleave(
    tasks: Mapping[str, T], *, rounds: int, warmup: int = 2, take: Callable[[T], float] = timed
) -> dict[str, list[float]]:
    """Seconds of each task in each round, which `take` finds. All tasks run in every round, in an order drawn anew, so that a
    disturbance of the machine meets all of them alike."""
    order, shuffle = list(tasks), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(-warmup, rounds):
        wait_for_quiet()
        shuffle(order)
        for name in order:
            gc.collect()
            taken = take(tasks[name])
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def compare_pairs(shapes: Sequence[S], tasks: Callable[[S], Mapping[str, Task]], rounds: int) -> list[dict[str, Any]]:
    """Median seconds of two tasks at each shape, and how many times as fast the second one is."""
    rows = []
    for shape in shapes:
        seconds = interleave(tasks(shape), rounds=rounds)
        first, second = seconds.values()
        medians = {name: median(taken) for name, taken in seconds.items()}
        rows.append({"shape": str(shape), **medians, "ratio": median_ratio(first, second)})
    return rows


def repeated(run: Callable[[Tensor], object], x: Tensor, times: int) -> Task:
    """Inference on the same images, so many times."""

    def task() -> None:
        with torch.no_grad():
            for _ in range(times):
                run(x)

    return task


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median over the rounds of `above / below`."""
    return median(a / b for a, b in zip(above, below, strict=True))


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    """What `probes.py` prints when called with these arguments."""
    run = subprocess.run([sys.executable, str(HERE / "probes.py"), *arguments], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"probes.py {' '.join(arguments)} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


class Server:
    """A process of its own for one contestant, which runs its tasks when asked to.

    In one process they would change each other's times: the C library keeps freed memory, or gives it back, by the sizes that
    the process has freed before.
    """

    def __init__(self, *arguments: str, program: str = "probes.py") -> None:
        command = [sys.executable, str(HERE / program), "serve", *arguments]
        self.arguments = arguments
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, task: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(task, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(TAKEN):
                return float(line.removeprefix(TAKEN))
        raise RuntimeError(f"a server of {' '.join(self.arguments)} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer(tasks: Mapping[str, Task]) -> None:
    """What a server does: runs what each line of the input names twice, as in a loop, and prints the seconds of the second."""
    for line in sys.stdin:
        task = tasks[line.strip()]
        task()
        gc.collect()
        print(TAKEN, timed(task), flush=True)


class Disturbance:
    """The share of the processor time that went to others (other processes, other machines on the host) since the start."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float | None:
        if self.start is None:
            return None
        clock, busy, own = (now - then for now, then in zip(self._now() or self.start, self.start, strict=True))
        return max(0.0, busy - own) / (clock * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds: clock, busy processors, this process and its finished children."""
        if not STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])


def wait_for_quiet() -> None:
    """Small parallel operations take many times longer beside a busy neighbour: wait for a pause, but not for ever."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        disturbance = Disturbance()
        time.sleep(0.2)
        if (disturbance.share() or 0.0) < QUIET:
            return


def machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in _lines(CPU_INFO) if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": THREADS, "system": platform.system()}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in (("escnn", "escnn"), ("revit", "revit-torch")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found


def origin(command: str) -> dict[str, Any]:
    """Where figures come from: the head of each result file."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": f"python benchmarks/{command}", "date": date, **commit(), "machine": machine(), "versions": versions()}


def options_of(doc: str | None, result: str, **counts: int) -> argparse.Namespace:
    """The options of a small benchmark: how often (a name and its default), and where the result goes."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=HERE / "results" / result)
    return parser.parse_args()


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}", flush=True)


def write_measured(command: str, disturbance: Disturbance, path: Path, **found: Any) -> None:
    """A report of what was found, with where it comes from and how quiet the machine was."""
    write_report({**origin(command), **found, "share_of_processors_used_by_others": disturbance.share()}, path)


def commit() -> dict[str, Any]:
    """The commit, and whether files of the library differ from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(HERE.parent), *arguments], capture_output=True, text=True)

    try:
        head = git("rev-parse", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "revit")
    except FileNotFoundError:
        return {"commit": None, "library_changed": None}
    return {"commit": head.stdout.strip() or None, "library_changed": None if head.returncode else bool(changed.returncode)}
