"""The folder of a run: who has it, what it was started with, and what came out.

config.yaml  env.json  results.csv  tb/  checkpoints/last  checkpoints/best  test.json  audit.json  *.png
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from revit.data.cache import whole_file
from revit.training.recipe import Recipe, RecipeError, differences, read_recipe

MAY_CHANGE = frozenset(
    ("data.root", "data.workers", "data.memory_gb", "data.download", "data.max_bad", "train.save_seconds", "train.sharding")
)
"""Options that do not change what is computed, so that a run can be resumed with other ones."""
PROCESSES = "processes"


class RunError(ValueError):
    """A run folder that cannot be used. The message names it and says what to do."""


class RunFolder:
    """A run folder that this process holds: `with RunFolder(path) as folder`. Others get an error, not a corrupted run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self.described: dict[str, str] = {}  # the files that say what runs here

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def last(self) -> Path:
        return self.path / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        return self.path / "checkpoints" / "best"

    def start(self, recipe: Recipe, *, resume: bool, may_change: frozenset[str] = frozenset()) -> None:
        """Takes the folder for a run of this recipe. A folder with a run in it is taken only to resume that run.

        `may_change` names what may differ from how the run was started: options ("train.lr"), or "processes", their number.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            facts = environment()
            self._check(recipe, resume, may_change, facts[PROCESSES])
            self.described = {"config.yaml": recipe.to_yaml(), "env.json": json.dumps(facts, indent=1)}
            for name, text in self.described.items():
                self.write(name, text)
        except OSError as error:
            raise RunError(
                f"{error.filename or self.path}: cannot be written ({error.strerror}); choose another --out"
            ) from error

    def vanished(self) -> bool:
        """Whether the folder that was taken is there no more. It is made anew then, for the state that is to be saved.

        Raises `RunError` if another run has taken its place.
        """
        if self._lock is None or not self.described:
            return False
        try:
            same = os.path.samestat(os.stat(self.path / "run.lock"), os.fstat(self._lock.fileno()))
        except FileNotFoundError:
            same = False
        if same:
            return False
        self._lock.close()
        self.path.mkdir(parents=True, exist_ok=True)
        self._take()
        config = self.path / "config.yaml"
        if config.exists() and config.read_text() != self.described[config.name]:
            raise RunError(f"{self.path}: taken by another run while this one was using it; choose another --out")
        for name, text in self.described.items():
            self.write(name, text)
        return True

    def write(self, name: str, text: str) -> None:
        """A file of the folder, whole or not there."""
        with whole_file(self.path / name) as file:
            file.write(text.encode())

    def write_results(self, rows: list[dict[str, Any]]) -> None:
        """`results.csv`, one row an epoch."""
        if not rows:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        self.write("results.csv", text.getvalue())

    def _take(self) -> None:
        """A lock of the operating system: it ends with its process, however that dies."""
        self._lock = open(self.path / "run.lock", "a+")  # noqa: SIM115 (held as long as the run lasts)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise RunError(f"{self.path}: in use by {owner}; wait for it or choose another --out") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def _check(self, recipe: Recipe, resume: bool, may_change: frozenset[str], processes: int) -> None:
        config = self.path / "config.yaml"
        if not config.exists():
            foreign = [entry.name for entry in self.path.iterdir() if entry.name != "run.lock"]
            if foreign:
                raise RunError(f"{self.path}: holds {sorted(foreign)[0]} and no run; choose another --out")
            return
        try:
            before = read_recipe(config)
        except (RecipeError, yaml.YAMLError) as error:
            raise RunError(f"{config}: damaged ({error}); choose another --out") from error
        if not resume:
            raise RunError(f"{self.path}: holds a run already; add --resume to go on with it, or choose another --out")
        changed = differences(before, recipe.to_dict(), ignored=MAY_CHANGE | may_change)
        count = self._processes()
        if count not in (None, processes) and PROCESSES not in may_change:
            changed.append(f"{PROCESSES} ({count}, now {processes})")
        if changed:
            names = ",".join(text.split(" ")[0] for text in changed)
            raise RunError(
                f"{self.path}: was started with another configuration: {'; '.join(changed)}; choose another --out,"
                f" or add --allow-change {names}"
            )

    def _processes(self) -> int | None:
        """How many processes the run had, if its folder says so."""
        try:
            return int(json.loads((self.path / "env.json").read_text())[PROCESSES])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def environment() -> dict[str, Any]:
    """Command, commit, versions and machine: what a result needs to be believed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "command": " ".join(["revit", *sys.argv[1:]]),
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def commit() -> str:
    """The commit of the code that runs, with a mark if files were changed; "unknown" for an installed package."""
    project = Path(__file__).resolve().parents[2]
    try:
        if Path(_git(project, "rev-parse", "--show-toplevel")).resolve() != project:
            return "unknown"  # installed somewhere inside another project
        changed = _git(project, "status", "--porcelain", "--untracked-files=no")
        return _git(project, "rev-parse", "--short", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(project: Path, *words: str) -> str:
    command = ["git", "-C", str(project), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
