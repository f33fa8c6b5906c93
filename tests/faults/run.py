"""The fault-injection suite with its full counts: python -m tests.faults.run [--at-most N] [--only WORD] [--out FILE]

Prints a line for each item (tried, survived, lost), writes the result file, and exits with 0 only if nothing was lost.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from revit.data.cache import whole_file
from revit.training.run_folder import commit
from tests.faults import archives, exactness, fuzzing, hostile, inputs, kills, load, machine, numbers, processes, supply
from tests.faults.tally import Tally

Scenario = Callable[[Path, int, int], Tally]


@dataclass(frozen=True)
class Item:
    """Scenarios of one line of the table: what is done, with how many trials in full and in the quick tests.

    A scenario whose cases are a fixed list has the counts 1 and 1; 0 leaves it out of the quick tests, where other
    tests hold it already.
    """

    number: int
    name: str
    scenario: Scenario
    full: int
    quick: int


ITEMS = [
    Item(1, "killed while saving", kills.kills_while_saving, 200, 5),
    Item(1, "resumed at a random step", kills.resumes_at_random_steps, 20, 0),
    Item(1, "training process killed and resumed", kills.killed_trainings, 20, 0),
    Item(1, "finished, or changed, and resumed", kills.finished_and_changed, 1, 1),
    Item(2, "checkpoint cut", hostile.truncations, 100, 20),
    Item(2, "bit of a checkpoint flipped", hostile.bit_flips, 1000, 50),
    Item(2, "checkpoint with the wrong things in it", hostile.wrong_contents, 1, 1),
    Item(2, "pickle payload at every door", hostile.pickles, 1, 1),
    Item(2, "safetensors header that lies", hostile.safetensors_headers, 1, 1),
    Item(2, "hostile archive", archives.archives, 1, 0),
    Item(3, "odd or broken image file", inputs.images, 1, 1),
    Item(3, "image file with noise in it", inputs.noise, 5000, 200),
    Item(3, "HDF5 and amat file", inputs.tables, 1, 0),
    Item(3, "odd folder, bad images skipped", inputs.folders, 1, 1),
    Item(4, "odd input of a model", numbers.inputs, 1, 1),
    Item(4, "loss that is not a number", numbers.bad_losses, 30, 1),
    Item(5, "disk full", machine.full_disks, 50, 5),
    Item(5, "no permission", machine.permissions, 1, 0),
    Item(5, "run folder vanishes", machine.vanishing, 10, 1),
    Item(5, "Ctrl-C and SIGTERM, once and twice", machine.signals, 20, 1),
    Item(5, "two runs in one folder", machine.two_runs, 5, 0),
    Item(5, "data worker killed, raising or hanging", machine.broken_workers, 12, 3),
    Item(5, "one of two processes killed", processes.killed_ranks, 10, 0),
    Item(5, "batches that do not divide by two", processes.uneven_batches, 3, 0),
    Item(5, "another number of processes", processes.other_numbers, 1, 0),
    Item(6, "many forwards", load.forwards, 10_000, 60),
    Item(6, "many images, corrupt ones among them", load.predictions, 50_000, 200),
    Item(6, "two runs with the same seed", load.same_seeds, 6, 0),
    Item(7, "name of a group, mutated", fuzzing.mutations(fuzzing.group_names), 195_000, 5000),
    Item(7, "recipe, mutated", fuzzing.mutations(fuzzing.recipes), 100_000, 200),
    Item(7, "recipe with types, mutated", fuzzing.mutations(fuzzing.typed_recipes), 5_000, 50),
    Item(7, "amat file, mutated", fuzzing.mutations(fuzzing.amat), 150_000, 1000),
    Item(7, "idx file, mutated", fuzzing.mutations(fuzzing.idx), 150_000, 1000),
    Item(7, "npz file, mutated", fuzzing.mutations(fuzzing.npz), 150_000, 500),
    Item(7, "CSV table of images, mutated", fuzzing.mutations(fuzzing.csv_manifests), 150_000, 1000),
    Item(7, "manifest of a checkpoint, mutated", fuzzing.mutations(fuzzing.checkpoint_manifests), 100_000, 500),
    Item(8, "source that runs what it reads", supply.sources, 1, 0),
    Item(8, "package with another hash", supply.packages, 20, 1),
    Item(9, "image turned or mirrored, bit-exact mode", exactness.turned_images, 1000, 5),
]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run")
    parser.add_argument("--at-most", type=int, default=10**9, help="trials of a scenario, where its full count is higher")
    parser.add_argument("--only", default="", help="items whose name has this pattern; other rows of the result file stay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="result file (JSON), written after each item")
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # processes are forked
    lost, now = 0, commit()  # of the code that was imported, not of what is there when an item ends
    for item in (item for item in ITEMS if re.search(options.only, item.name)):
        row = run(item, min(item.full, options.at_most), options.seed) | {"commit": now}
        lost += len(row["lost"])
        print(
            f"{row['item']}. {row['name']:<40} tried {row['tried']:>7,}  survived {row['survived']:>7,}"
            f"  lost {len(row['lost']):>4}  {row['seconds']:>7.1f} s", flush=True,
        )  # fmt: skip
        for text in row["lost"][:10]:
            print(f"   lost: {text}", flush=True)
        if options.out:
            _keep(Path(options.out), row, options.seed)
    return int(lost > 0)


def run(item: Item, count: int, seed: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    begin = time.monotonic()
    try:
        tally = item.scenario(folder, count, seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    survived = tally.tried - len(tally.lost)
    said = (item.scenario.__doc__ or "").strip()
    return {
        "item": item.number, "name": item.name, "what": said, "count": count, "tried": tally.tried, "survived": survived,
        "lost": tally.lost, "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def _keep(path: Path, row: dict[str, Any], seed: int) -> None:
    """Puts a row into the result file, in the place of the one of an earlier run with the same seed."""
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "seed": seed}
    known = {old["name"]: old for old in before["rows"] if "commit" in old and before["seed"] == seed} | {row["name"]: row}
    rows = [known[item.name] for item in ITEMS if item.name in known]
    fewer = [known[item.name]["count"] for item in ITEMS if item.name in known and known[item.name]["count"] < item.full]
    result = {
        "command": "python -m tests.faults.run" + (f" --at-most {max(fewer)}" if fewer else ""),
        "commit": ", ".join(dict.fromkeys(old["commit"] for old in rows)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.system()} {platform.machine()}",
        "seed": seed,
        "rows": rows,
    }
    with whole_file(path) as file:
        file.write(json.dumps(result, indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
