"""Models from options, and from run folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from revit.data import DataOptions, DataSpec
from revit.models import create_model
from revit.training.checkpoint import MANIFEST, Checkpoint, CheckpointError, read_checkpoint
from revit.training.recipe import ModelOptions, Recipe, RecipeError, read_recipe
from revit.training.run_folder import RunError


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what it was trained on."""

    path: Path  # the run folder, or the checkpoint if only that is there
    model: nn.Module
    spec: DataSpec
    group: str
    recipe: dict[str, Any]
    data_root: str | None  # where its data was, if the run folder knows
    checkpoint: Checkpoint


def build_model(options: ModelOptions, spec: DataSpec) -> nn.Module:
    """The model for images of this description. Refuses sizes at which it could not be exact."""
    model = create_model(options.name, in_chans=spec.channels, num_classes=spec.num_classes, **options.arguments())
    made_for = getattr(model, "task", "classification")
    if made_for != spec.task:
        fix = "choose a model with seg in its name" if spec.task == "segmentation" else "choose one without seg in its name"
        raise RecipeError(f"model.name {options.name} is for {made_for}, {spec.name} for {spec.task}; {fix}")
    check = getattr(model, "check_input_size", None)
    if check is not None:
        check(*spec.size)
    return model


def checkpoint_config(recipe: Recipe, spec: DataSpec) -> dict[str, Any]:
    """What is kept with the weights, so that a checkpoint folder can be used by itself."""
    values = recipe.to_dict()
    values["data"]["root"] = None  # a path of this machine, of no use elsewhere
    return {"recipe": values, "data": spec.to_dict()}


def load_run(path: Path, which: str = "best") -> LoadedRun:
    """The model of a run folder, or of one checkpoint folder of it, with its weights."""
    folder = path if (path / MANIFEST).is_file() else path / "checkpoints" / which
    if not folder.is_dir():
        there = [entry.name for entry in (path / "checkpoints").glob("[!.]*")] if path.is_dir() else []
        hint = f"it has {', '.join(sorted(there))}: add --checkpoint" if there else "train one with `revit train`"
        raise RunError(f"{path}: no run with a checkpoint {which!r} here; {hint}")
    checkpoint = read_checkpoint(folder)
    try:
        recipe, spec = checkpoint.config["recipe"], DataSpec.from_dict(checkpoint.config["data"])
        options = ModelOptions(**recipe["model"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: its config.json is of another version ({error})") from error
    model = build_model(options, spec)
    dtype = next(iter(checkpoint.model.values())).dtype
    model.to(dtype if dtype.is_floating_point else None)
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: weights of another model ({' '.join(str(error).split()[:40])})") from error
    config = path / "config.yaml"
    root = read_recipe(config)["data"].get("root") if config.is_file() else None
    return LoadedRun(path, model.eval(), spec, options.group, recipe, root, checkpoint)


def newest_run(below: Path = Path("runs")) -> Path:
    """The run under `runs/` whose best checkpoint is the newest: what people mean when they name none."""
    found = sorted(below.glob("*/checkpoints/best/" + MANIFEST), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunError(f"no run under {below}/; name one with --run, or train one with `revit train`")
    return found[-1].parents[2]


def run_data(run: LoadedRun, root: str | None, on_bad: str | None) -> DataOptions:
    """The data options of a run; its root is only in the run folder's own config, not in the checkpoint."""
    values = dict(run.recipe["data"])
    values["root"] = root or run.data_root
    height, width = run.spec.size
    values["size"] = height if height == width else None  # other images of a folder are resized to what the model takes
    return DataOptions(**{**values, **({"on_bad": on_bad} if on_bad else {})})
