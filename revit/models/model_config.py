"""What a model was built from, as a value and as `config.json`; and the models whose weights come with the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from revit.weight_files import CONFIG, WeightFileError, read_json

FORMAT = 1
WEIGHTS = Path(__file__).parents[1] / "weights"
"""One folder for each model whose weights come with the package."""
LARGEST_OPTION, LARGEST_LIST = 100_000, 64


@dataclass(frozen=True)
class ModelConfig:
    """The registered name and the options of a model, and what is known of the images that it was trained on."""

    model: str
    options: dict[str, Any]
    data: dict[str, Any] | None = None


class PretrainedError(ValueError):
    """Weights that cannot be saved or used. The message names the folder or file and says why."""


def shipped() -> dict[str, Path]:
    """The models whose weights come with the package, by name."""
    return {path.parent.name: path.parent for path in sorted(WEIGHTS.glob(f"*/{CONFIG}"))}


def shipped_folder(name: str) -> Path:
    """Where the weights of a model are that come with the package."""
    if name not in shipped():
        there = ", ".join(shipped()) or "none in this installation"
        raise PretrainedError(f"no weights of {name!r} come with the package; with weights: {there}")
    return shipped()[name]


def has_config(folder: Path) -> bool:
    """Whether a folder says of which model its weights are, as those of `save_pretrained` and of checkpoints do."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> ModelConfig:
    """The config of a folder, checked: a registered model, plain options, and facts that fit them."""
    path = folder / CONFIG
    try:
        values = read_json(path)
    except WeightFileError as error:
        raise PretrainedError(str(error)) from error
    name, options, data = values.get("model"), values.get("options"), values.get("data")
    if values.get("library_name") != "revit" or not _is_name(name) or not isinstance(options, dict):
        raise PretrainedError(f"{path}: not the config of a model of revit (no library_name, model and options)")
    if values.get("format") != FORMAT:
        raise PretrainedError(f"{path}: of format {values.get('format')!r}, this version reads {FORMAT}")
    check_options(options, path)
    return ModelConfig(name, options, checked_data(data, options, path))


def check_options(options: Mapping[str, Any], path: Path) -> None:
    """Refuses what no model of ours has for options, and options that do not say what every model has."""
    for key, value in options.items():
        if not _is_name(key) or not _is_plain(value):
            raise PretrainedError(f"{path}: no option of a model: {printable(key)}={shorten(repr(value))}")
    missing = [key for key in ("group", "in_chans", "num_classes") if key not in options]
    if missing:
        raise PretrainedError(f"{path}: the options lack {missing[0]}")


def checked_data(data: Any, options: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """What is known of the images: nothing, or facts that fit the model."""
    if data is None:
        return None
    if not isinstance(data, dict):
        raise PretrainedError(f"{path}: data is no description of images: {shorten(repr(data))}")

    def check(key: str, fits: bool, what: str) -> None:
        if not fits:
            raise PretrainedError(f"{path}: data.{key} must be {what}, got {shorten(repr(data[key]))}")

    channels, classes = options["in_chans"], options["num_classes"]
    for key, value in data.items():
        is_list = isinstance(value, list)
        if key == "classes":
            names = is_list and all(isinstance(name, str) for name in value)
            check(key, names and len(value) == len(set(value)) == classes, f"{classes} different names")
        elif key in ("mean", "std"):
            numbers = is_list and len(value) == channels and all(_is_number(number) for number in value)
            positive = numbers and (key == "mean" or min(value) > 0)
            check(key, positive, f"{channels} finite numbers{' above 0' * (key == 'std')}")
        elif key == "size":
            sides = is_list and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
            check(key, sides, "a height and a width")
    return data


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.isascii() and value.isidentifier()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    """Whether a value is one that options of models have, of a size that they have."""
    if isinstance(value, list):
        return len(value) <= LARGEST_LIST and all(_is_number(v) and abs(v) <= LARGEST_OPTION for v in value)
    if isinstance(value, str):
        return len(value) <= LARGEST_LIST
    return value is None or isinstance(value, bool) or (_is_number(value) and abs(value) <= LARGEST_OPTION)


def shorten(value: object) -> str:
    """The text of a value, for a message of one line."""
    return " ".join(str(value).split())[:160]


def printable(text: object) -> str:
    """A text of others, for a message: without what a terminal would act on, and not too long."""
    shown = str(text)[:100]
    return shown if shown.isprintable() else ascii(shown)
