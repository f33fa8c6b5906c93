"""What a run is made of: typed options, read from YAML recipes, each of which can name another recipe as its base."""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from revit.data.augment import AugmentOptions
from revit.data.spec import DataOptions

OPTIMIZERS = ("adamw", "muon", "group_muon")
SCHEDULES = ("onecycle", "cosine", "constant")
PRECISIONS = ("float32", "bf16", "float64")
SHARDINGS = ("ddp", "fsdp")
MAX_RECIPE_BYTES = 1_000_000
MAX_RECIPE_VALUES = 10_000


class RecipeError(ValueError):
    """A recipe that cannot be used. The message names it and says what to do."""


@dataclass
class ModelOptions:
    """Which model. What is left out keeps the model's own value.

    Args:
        name: A registered model; `revit models` lists them.
        group: Rotations and mirrors that the prediction does not depend on: z2, z2m, p4, p4m, p8, p8m, p12, ...
        dims: Fields (channels) of the model, or of each stage.
        depths: Transformer blocks, or blocks of each stage.
        num_heads: Attention heads, or heads of each stage.
        stride: Stride of the lifting layer, or of each layer of a lifting stem.
        kernel_size: Kernel of the projections to queries, keys and values.
        attention: joint (positions and elements, the paper's equations), spatial (the released code) or per_element.
        neighbourhood: What a pixel attends to: global, window or local.
        window_size: Side of the windows or of the local neighbourhood.
        shift_windows: Shift every second block by half a window.
        kv_reduction: Keys and values are means of parts of this side (with neighbourhood global); 1 for every pixel.
        projection: full or separable.
        filters: free, steerable, rbf, interpolate, or auto.
        norm: batch or layer.
        mlp_ratio: Width of the MLP relative to the block.
        head_hidden: Width of the hidden layer of the classifier.
        drop_rate: Dropout of whole fields, and in the classifier.
        attn_drop_rate: Dropout of attention weights.
        drop_path_rate: Stochastic depth of the last block; earlier ones have less.
        elementwise_dropout: Drop single numbers as the released code does.
        odd_strides: Strided kernels of odd size as in the released code, which are not exact at even sizes.
        smooth_strides: Blur before pixels are left out: for groups with turns of less than 90 degrees, such as p8.
        init: normal or released.
        strict: Refuse input sizes where exact equivariance is impossible, instead of warning.
    """

    name: str = "revit_small"
    group: str = "p4"
    dims: int | list[int] | None = None
    depths: int | list[int] | None = None
    num_heads: int | list[int] | None = None
    stride: int | list[int] | None = None
    kernel_size: int | None = None
    attention: str | None = None
    neighbourhood: str | None = None
    window_size: int | None = None
    shift_windows: bool | None = None
    kv_reduction: int | None = None
    projection: str | None = None
    filters: str | None = None
    norm: str | None = None
    mlp_ratio: float | None = None
    head_hidden: int | None = None
    drop_rate: float | None = None
    attn_drop_rate: float | None = None
    drop_path_rate: float | None = None
    elementwise_dropout: bool | None = None
    odd_strides: bool | None = None
    smooth_strides: bool | None = None
    init: str | None = None
    strict: bool | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments for `create_model`, besides the name: what was set."""
        return {name: value for name, value in asdict(self).items() if name != "name" and value is not None}


@dataclass
class TrainOptions:
    """How it is trained.

    Args:
        epochs: Passes over the training images.
        batch_size: Images of one optimiser step, over all processes.
        accumulate: Parts that a batch is computed in, to save memory; the step is the same.
        optimizer: adamw, muon (orthogonal steps for filters and matrices, AdamW for the rest) or group_muon (steps that are
            orthogonal as maps on the group).
        lr: Largest learning rate.
        weight_decay: Of matrices and filters; norms and biases are left alone.
        schedule: onecycle (cosine up and down, momentum opposite), cosine (linear warm-up, cosine down) or constant.
        warmup: Share of all steps in which the learning rate rises.
        lr_start: Learning rate of the first step, relative to the largest.
        lr_end: Learning rate of the last step, relative to the largest.
        label_smoothing: Share of a target that goes to all classes evenly.
        clip: Largest norm of the gradient; 0 for any.
        precision: float32, bf16 (mixed) or float64.
        ema: Decay of the moving average of the weights that is evaluated and saved; 0 for none.
        early_stopping: Stop after this many epochs without a better validation accuracy; 0 for never.
        grad_checkpointing: Compute blocks again in the backward pass instead of storing them.
        sharding: What processes have of the weights: ddp (each has all) or fsdp (each has a part); the step is the same.
        seed: Of the initial weights, the order and the augmentation.
        save_seconds: A checkpoint at least this often, besides the one after each epoch.
    """

    epochs: int = 20
    batch_size: int = 64
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.01
    schedule: str = "onecycle"
    warmup: float = 0.1
    lr_start: float = 0.1
    lr_end: float = 0.001
    label_smoothing: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    ema: float = 0.0
    early_stopping: int = 0
    grad_checkpointing: bool = False
    sharding: str = "ddp"
    seed: int = 0
    save_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise RecipeError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "ema", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"train.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("lr_start", "lr_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"train.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("weight_decay", "clip", "early_stopping", "save_seconds"):
            if getattr(self, name) < 0:
                raise RecipeError(f"train.{name} must be 0 or more, got {getattr(self, name)}")
        if not self.lr > 0:
            raise RecipeError(f"train.lr must be above 0, got {self.lr}")
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("sharding", SHARDINGS),
        ):
            if getattr(self, name) not in choices:
                raise RecipeError(f"train.{name} must be {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.optimizer != "adamw" and self.sharding == "fsdp":
            raise RecipeError(
                f"train.optimizer {self.optimizer} needs whole matrices, and train.sharding fsdp leaves parts: "
                "choose adamw, or ddp"
            )
        if self.accumulate > self.batch_size:
            raise RecipeError(f"train.accumulate ({self.accumulate}) is larger than the batch ({self.batch_size})")


@dataclass
class Recipe:
    """A whole run: the model, the data, its augmentation, and the training."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    augment: AugmentOptions = field(default_factory=AugmentOptions)
    train: TrainOptions = field(default_factory=TrainOptions)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {section.name: asdict(getattr(self, section.name)) for section in fields(self)}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def list_recipes() -> dict[str, str]:
    """The name of every recipe of the package and what it says of itself."""
    found = {}
    for entry in resources.files("revit.recipes").iterdir():
        if entry.name.endswith(".yaml"):
            found[entry.name.removesuffix(".yaml")] = str(_parse(entry.read_text(), entry.name).get("description", ""))
    return dict(sorted(found.items()))


def read_recipe(name: str | Path) -> dict[str, dict[str, Any]]:
    """The values of a recipe by section: one of the package by its name, or a YAML file by its path."""
    return _resolve(name, seen=())


def differences(before: dict[str, Any], after: dict[str, Any], *, ignored: frozenset[str] = frozenset()) -> list[str]:
    """What was changed between two recipes: "train.lr (0.01, now 0.02)", ..."""
    changed = []
    for section, values in after.items():
        for option, value in values.items():
            old = before.get(section, {}).get(option)
            if old != value and f"{section}.{option}" not in ignored:
                changed.append(f"{section}.{option} ({old}, now {value})")
    return changed


def _resolve(name: str | Path, seen: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    if str(name) in seen:
        raise RecipeError(f"recipe {name} is its own base: {' -> '.join([*seen, str(name)])}")
    text, label = _read(name)
    values = _parse(text, label)
    base = values.pop("base", None)
    values.pop("description", None)
    if not isinstance(base, str | None):
        raise RecipeError(f"{label}: base names a recipe, got {reprlib.repr(base)}")
    sections = {section.name for section in fields(Recipe)}
    for section, content in values.items():
        if section not in sections:
            near = difflib.get_close_matches(str(section), sections, n=1) or sorted(sections)
            raise RecipeError(f"{label}: unknown section {section!r}; did you mean {', '.join(near)}?")
        if not isinstance(content, dict):
            raise RecipeError(f"{label}: section {section!r} must hold options, got {reprlib.repr(content)}")
    merged = _resolve(base, (*seen, str(name))) if base is not None else {}
    for section, content in values.items():
        merged[section] = {**merged.get(section, {}), **content}
    return merged


def _read(name: str | Path) -> tuple[str, str]:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            if path.stat().st_size > MAX_RECIPE_BYTES:
                raise RecipeError(f"{path}: larger than any recipe")
            return path.read_text(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    entries = {entry.name: entry for entry in resources.files("revit.recipes").iterdir()}
    entry = entries.get(f"{name}.yaml")
    if entry is None:
        near = difflib.get_close_matches(str(name), list_recipes(), n=3, cutoff=0.4) or ["demo", "folder"]
        raise RecipeError(f"unknown recipe {str(name)!r}; did you mean {', '.join(near)}? `revit recipes` lists all")
    return entry.read_text(), f"recipe {name}"


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
        size = _size(values, {})
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:  # "!!bool maybe"
        line = " ".join(str(error).split())
        raise RecipeError(f"{label}: not YAML ({line})") from error
    if size > MAX_RECIPE_VALUES:
        raise RecipeError(f"{label}: more than {MAX_RECIPE_VALUES:,} values, which no recipe has")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{label}: a recipe has the sections {', '.join(f.name for f in fields(Recipe))}")
    return values


def _size(values: Any, known: dict[int, int]) -> int:
    """How many values there are when aliases are written out, which may be a billion in a few lines."""
    if not isinstance(values, dict | list | tuple | set):
        return 1
    if id(values) not in known:
        known[id(values)] = 1 + MAX_RECIPE_VALUES  # an alias inside of what it stands for has no end
        inner = values.values() if isinstance(values, dict) else values
        known[id(values)] = 1 + sum(_size(value, known) for value in inner)
    return known[id(values)]
