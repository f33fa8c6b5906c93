"""`revit benchmark data`: does training wait for its images on this machine?"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from revit.cli.parser import Parser, UsageError
from revit.cli.report import write_json
from revit.data import DataOptions, Dataset, open_dataset
from revit.data.augment import AugmentOptions
from revit.data.loader import Reading, TrainLoader
from revit.models import create_model
from revit.training.run_folder import environment

ABOUT = """The share of a training step that is spent waiting for the next batch, for images kept in memory and for PNG files
that are decoded in every epoch, at several sizes. The model is revit_tiny p4 with random turns; a larger one waits less."""


def run(words: list[str]) -> int:
    parser = Parser("benchmark data", "[--sizes [28,96]] [--batch-size 64] [--workers [0,2]] [--out FILE.json]", ABOUT)
    parser.add_argument("--sizes", type=list[int], default=[28, 96], metavar="[28,96]", help="sides of the images")
    parser.add_argument("--workers", type=list[int], default=[0, 2], metavar="[0,2]", help="reading processes to try for files")
    parser.add_argument("--batch-size", metavar="N", type=int, default=64, help="images of a step")
    parser.add_argument("--steps", metavar="N", type=int, default=12, help="steps that are measured")
    parser.add_argument("--out", metavar="FILE.json", type=str, help="also write the figures")
    options = parser.parse_args(words)
    if min(options.batch_size, options.steps, *options.sizes) < 1 or min(options.workers) < 0:
        raise UsageError("sizes, batch size and steps must be at least 1, workers at least 0")
    rows = []
    for size in options.sizes:
        for kept in (True, False):
            for workers in [0] if kept else options.workers:
                rows.append(_measure(size, kept, workers, options.batch_size, options.steps))
    table = Table(box=None)
    for column in ("images", "size", "workers", "waiting", "augmenting", "training step", "images/s"):
        table.add_column(column, justify="left" if column == "images" else "right")
    for row in rows:
        table.add_row(
            row["images"], f"{row['size']}", f"{row['workers']}", f"{row['waiting']:.2%}", f"{row['augmenting']:.2%}",
            f"{1000 * row['step_seconds']:.0f} ms", f"{row['images_per_second']:.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.out:
        write_json(Path(options.out), {"rows": rows, **environment()})
    return 0


def _measure(size: int, kept: bool, workers: int, batch_size: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        dataset = _dataset(Path(folder), size, kept, batch_size * (steps + 4))
        loader = TrainLoader(
            dataset.train, dataset.spec, batch_size=batch_size, augment=AugmentOptions(rotate=180),
            reading=Reading(workers=workers),
        )  # fmt: skip
        model = create_model(
            "revit_tiny", group="p4", in_chans=3, num_classes=2, attention="spatial", stride=2 if size < 64 else 4
        )
        waiting = augmenting = total = 0.0
        batches = loader.batches(epoch=0)
        for step in range(steps + 2):  # the first two warm up
            start = time.perf_counter()
            (batch,) = next(batches)
            read = time.perf_counter()
            images, targets = loader.prepare(batch, 0, torch.device("cpu"), torch.float32)
            prepared = time.perf_counter()
            F.cross_entropy(model(images), targets).backward()
            end = time.perf_counter()
            if step >= 2:
                waiting, augmenting, total = waiting + read - start, augmenting + prepared - read, total + end - start
    return {
        "images": "kept in memory" if kept else "PNG files",
        "size": size,
        "workers": workers,
        "batch_size": batch_size,
        "waiting": waiting / total,
        "augmenting": augmenting / total,
        "step_seconds": total / steps,
        "images_per_second": steps * batch_size / total,
    }


def _dataset(folder: Path, size: int, kept: bool, count: int) -> Dataset:
    """Smooth noise as PNG files in two classes: their size on disk is that of photographs."""
    from PIL import Image

    generator = np.random.Generator(np.random.PCG64(0))
    for i in range(2 * count):
        coarse = generator.integers(0, 256, (size // 4 + 1, size // 4 + 1, 3), dtype=np.uint8)
        path = folder / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path)
    return open_dataset(DataOptions(name="folder", root=str(folder), memory_gb=2.0 if kept else 0.0))
