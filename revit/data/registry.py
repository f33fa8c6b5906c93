"""Datasets by name: one dict, one decorator, one function that opens them."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from revit.data.spec import DataError, DataOptions, Dataset

Opener = Callable[..., Dataset]  # of the options; with an argument `progress(done, total)` if opening takes long
Progress = Callable[[int, int], None]
_DATASETS: dict[str, Opener] = {}


def register_dataset(name: str) -> Callable[[Opener], Opener]:
    """Adds a function that opens a dataset to the registry; its docstring's first line describes it to users."""

    def register(opener: Opener) -> Opener:
        if name in _DATASETS:
            raise ValueError(f"a dataset named {name!r} is already registered")
        _DATASETS[name] = opener
        return opener

    return register


def list_datasets() -> dict[str, str]:
    """The name of every dataset and one line on it."""
    return {name: (opener.__doc__ or "").strip().splitlines()[0] for name, opener in sorted(_DATASETS.items())}


def open_dataset(options: DataOptions, progress: Progress | None = None) -> Dataset:
    """Finds, checks and opens a dataset. Without a root, REVIT_DATA is looked at. `progress(done, total)` is told of scans."""
    if options.name not in _DATASETS:
        near = difflib.get_close_matches(options.name, _DATASETS, n=3, cutoff=0.4) or sorted(_DATASETS)
        raise DataError(f"unknown dataset {options.name!r}; did you mean {', '.join(near)}? `revit data` lists all")
    if options.root is None:
        options = replace(options, root=os.environ.get("REVIT_DATA") or None)
    opener = _DATASETS[options.name]
    return opener(options, progress) if "progress" in inspect.signature(opener).parameters else opener(options)


def data_root(options: DataOptions) -> Path:
    """The folder that the user named, checked."""
    if options.root is None:
        raise DataError(f"{options.name} needs its folder: give --data-root DIR or set REVIT_DATA")
    root = Path(options.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"{root}: {'not a folder' if root.exists() else 'no such folder'}; --data-root names the folder of {options.name}"
        )
    return root
