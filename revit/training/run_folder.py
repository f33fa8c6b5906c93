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

MAY_CHANGE = frozenset({"data.root", "data.workers", "data.memory_gb", "data.download", "train.save_seconds", "train.sharding"})
"""Options that do not change what is computed, so that a run can be resumed with other ones."""


class RunError(ValueError):
    """A run folder that cannot be used. The message names it and says what to do."""


class RunFolder:
    """A run folder that this process holds: `with RunFolder(path) as folder`. Others get an error, not a corrupted run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

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

    def start(self, recipe: Recipe, *, resume: bool) -> None:
        """Takes the folder for a run of this recipe. A folder with a run in it is taken only to resume that run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            self._check(recipe, resume)
            self.write("config.yaml", recipe.to_yaml())
            self.write("env.json", json.dumps(environment(), indent=1))
        except OSError as error:
            raise RunError(
                f"{error.filename or self.path}: cannot be written ({error.strerror}); choose another --out"
            ) from error

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

    def _check(self, recipe: Recipe, resume: bool) -> None:
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
        changed = differences(before, recipe.to_dict(), ignored=MAY_CHANGE)
        if changed:
            raise RunError(f"{self.path}: was started with another configuration: {'; '.join(changed)}; choose another --out")


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
