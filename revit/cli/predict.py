"""`revit predict`: images in, a table out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from revit.cli.parser import Parser, UsageError
from revit.cli.runs import TRAINED, bit_exact_model, find_trained, load_run, newest_run
from revit.evaluation import find_images, write_predictions
from revit.evaluation.predict_masks import write_masks

ABOUT = """Predicts images, folders of images or glob patterns and writes a CSV file: path, label, confidence and a probability
for each class. Memory does not grow with the number of images. A run that was trained on masks writes a mask for each image, a
PNG file of class indices in the size of the image, into a folder beside the table (FILE_masks), and the table says which. With
--bit-exact each image is predicted by itself, and its turns and mirrors give the same numbers, to the last of nine digits."""


def run(words: list[str]) -> int:
    parser = Parser("predict", "IMAGES ... [--run RUN] --out FILE.csv", ABOUT)
    parser.add_argument(
        "images", metavar="IMAGES", nargs="+", type=str, help="files, folders (searched), or patterns as 'scans/**/*.png'"
    )
    parser.add_argument("--run", metavar="RUN", type=str, help=f"{TRAINED} (default: the newest in runs/)")
    parser.add_argument("--out", metavar="FILE.csv", type=str, required=True, help="the table to write")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights")
    parser.add_argument("--agreement", action="store_true", help="add the share of the group's turns and mirrors that agree")
    parser.add_argument(
        "--embeddings", metavar="FILE.npy", type=str, help="also write the invariant features, one row an image"
    )
    parser.add_argument(
        "--on-bad", default="stop", choices=["stop", "skip"], help="images that cannot be read: stop, or skip and list"
    )
    parser.add_argument("--bit-exact", action="store_true", help="the same answers for turned images, to the last bit")
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help="images at a time")
    options = parser.parse_args(words)
    if options.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, got {options.batch_size}")
    loaded = load_run(find_trained(options.run) if options.run else newest_run(), options.checkpoint)
    paths = find_images(options.images)
    asked = bit_exact_model(loaded) if options.bit_exact else loaded.model
    model = asked.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    shared: dict[str, Any] = {
        "agreement": loaded.group if options.agreement else None,
        "on_bad": options.on_bad,
        "batch_size": options.batch_size,
    }
    if loaded.spec.task == "segmentation":
        if options.embeddings:
            raise UsageError("--embeddings are one row an image; a run that was trained on masks has none: leave it out")
        written = write_masks(model, loaded.spec, paths, Path(options.out), **shared)
    else:
        embeddings = Path(options.embeddings) if options.embeddings else None
        shared |= {"embeddings": embeddings, "digits": 9 if options.bit_exact else 6}
        written = write_predictions(model, loaded.spec, paths, Path(options.out), **shared)
    console = Console(file=sys.stderr)
    console.print(f"{written.rows:,} images by {loaded.path} -> {options.out}", highlight=False, soft_wrap=True)
    if written.skipped:
        console.print(f"{written.skipped:,} images could not be read: {written.skipped_list}", highlight=False, soft_wrap=True)
    return 0
