"""Opening a dataset with something to look at while it is scanned for the first time."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from revit.data import DataOptions, Dataset, open_dataset

SHOWN = 10


def open_with_progress(options: DataOptions, console: Console) -> Dataset:
    """The dataset; images that had to be skipped are named."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading images", total=None)
        dataset = open_dataset(options, lambda done, total: bar.update(task, completed=done, total=total))
    report_skipped(console, dataset.skipped)
    return dataset


def report_skipped(console: Console, skipped: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> None:
    for _, reason in skipped[:SHOWN]:
        console.print(f"skipped: {reason}", highlight=False, markup=False, soft_wrap=True)
    if skipped:
        rest = f" ({len(skipped) - SHOWN} not shown)" if len(skipped) > SHOWN else ""
        console.print(f"{len(skipped)} images that cannot be read were skipped{rest}", highlight=False)
