"""`revit data`: which datasets are here, where they came from, and what they look like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from revit.cli import pack
from revit.cli.parser import Parser
from revit.cli.scanning import open_with_progress
from revit.data import DataError, DataOptions, Dataset, list_datasets, open_dataset
from revit.data.randomness import permutation
from revit.evaluation import draw_sheet

ABOUT = """Without a name: which datasets are found under --data-root (or REVIT_DATA). With a name: what it holds, where it
came from, and with --sheet a picture of some of its images. --data.download true fetches the official files. `revit data pack
FOLDER --out DIR` packs image files into archives for training sets of any size (`revit data pack --help`)."""
ELSEWHERE = ("folder", "masks", "arrays", "imagenet", "shards")  # opening reads all files, so a plain listing only names them


def run(words: list[str]) -> int:
    if words[:1] == ["pack"]:
        return pack.run(words[1:])
    parser = Parser("data", "[NAME] [--data-root DIR] [--sheet FILE.png] [--data.option value ...]", ABOUT)
    parser.add_argument("name", metavar="NAME", nargs="?", type=str, help="dataset to describe")
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data")
    parser.add_argument("--sheet", metavar="FILE.png", type=str, help="write a sheet of samples, each with its class")
    parser.add_argument("--split", default="train", choices=["train", "val", "test"], help="whose samples")
    parser.add_argument("--count", metavar="N", type=int, default=32, help="how many samples")
    parser.add_section("data", skip=frozenset({"name", "root"}))
    options = parser.parse_args(words)
    console = Console()
    data = DataOptions(name=options.name or "rotmnist5k", root=options.data_root, **vars(options.data))
    if options.name is None:
        _list(console, data)
        return 0
    dataset = open_with_progress(data, console)
    _describe(console, dataset)
    if options.sheet:
        _draw(dataset, options.split, max(1, options.count), Path(options.sheet))
        console.print(f"samples of {options.split}: {options.sheet}", highlight=False, soft_wrap=True)
    return 0


def _list(console: Console, data: DataOptions) -> None:
    table = Table(box=None)
    for column in ("dataset", "what it is", "here"):
        table.add_column(column)
    for name, about in list_datasets().items():
        table.add_row(name, about, _state(replace(data, name=name)))
    console.print(table)


def _state(data: DataOptions) -> str:
    if data.name in ELSEWHERE:
        return f"`revit data {data.name} --data-root DIR` looks"
    try:
        return open_dataset(replace(data, download=False)).spec.source
    except DataError as error:
        return f"no: {error}"


def _describe(console: Console, dataset: Dataset) -> None:
    spec = dataset.spec
    console.print(f"{spec.name}: {spec.source}", highlight=False, soft_wrap=True)
    console.print(f"{spec.channels} x {spec.size[0]} x {spec.size[1]}, {spec.num_classes} classes", highlight=False)
    for part in ("mean", "std"):
        console.print(f"{part} " + ", ".join(f"{value:.4f}" for value in getattr(spec, part)), highlight=False)
    table = Table(box=None)
    of_images = spec.task == "classification"  # of pixels there is no count by class without reading all masks
    for column in ("split", "images", *(("smallest class", "largest class") if of_images else ())):
        table.add_column(column, justify="left" if column == "split" else "right")
    for part in ("train", "val", "test"):
        images = dataset.split(part)
        counts = np.bincount(images.labels, minlength=spec.num_classes)
        extremes = [f"{spec.classes[i]} ({counts[i]:,})" for i in (counts.argmin(), counts.argmax())]
        table.add_row(part, f"{len(images):,}", *(extremes if of_images else ()))
    console.print(table)


def _draw(dataset: Dataset, split: str, count: int, path: Path) -> None:
    images = dataset.split(split)
    chosen = permutation(len(images), 0, "sheet")[:count]
    pixels = np.stack([images.read(int(i)) for i in chosen])
    values = pixels.astype(np.float32) / 255 if pixels.dtype == np.uint8 else pixels
    draw_sheet(values, [dataset.spec.classes[images.labels[i]] for i in chosen], path)
