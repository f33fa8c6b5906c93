"""`revit data pack`: a folder of images into archives that are read as a stream."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from revit.cli.parser import Parser
from revit.cli.scanning import open_with_progress
from revit.cli.units import parse_bytes, show_bytes
from revit.data import DataError, DataOptions
from revit.data.packing import pack_dataset

ABOUT = """Packs images that are files (one folder a class, a CSV manifest, or ImageNet's folders) into tar archives in the form
of webdataset, with a description beside them. The files stay as they are; train, validation and test are those of the folder.
`--data.name shards --data-root DIR` trains on the archives. DIR is there when all is written, or not at all."""


def run(words: list[str]) -> int:
    parser = Parser(
        "data pack", "FOLDER --out DIR [--shard-size 256MB] [--data.name imagenet] [--data.option value ...]", ABOUT
    )
    parser.add_argument("folder", metavar="FOLDER", type=str, help="folder with the images")
    parser.add_argument("--out", metavar="DIR", type=str, required=True, help="new folder for the archives")
    parser.add_argument("--shard-size", metavar="SIZE", type=str, default="256MB", help="largest size of an archive")
    parser.add_section("data", skip=frozenset({"root"}))
    parser.set_defaults({"data.name": "folder"})
    options = parser.parse_args(words)
    shard_bytes = parse_bytes(options.shard_size, "--shard-size")
    if options.data.name not in ("folder", "imagenet"):
        raise DataError(f"{options.data.name}: its images are no files of their own; only folder and imagenet can be packed")
    if not Path(options.folder).is_dir():
        raise DataError(f"{options.folder}: no such folder; FOLDER holds the images, one folder a class")
    console = Console()
    dataset = open_with_progress(DataOptions(root=options.folder, **vars(options.data)), console)
    out = Path(options.out)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing", total=None)
        archives = pack_dataset(
            dataset, out, shard_bytes=shard_bytes, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    for part, count in archives.items():
        size = sum(path.stat().st_size for path in out.glob(f"{part}-*.tar"))
        console.print(f"{part}: {len(dataset.split(part)):,} images in {count} archives, {show_bytes(size)}", highlight=False)
    console.print(f"revit train folder --data.name shards --data-root {out}", highlight=False, soft_wrap=True)
    return 0
