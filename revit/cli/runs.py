"""Models from options, from run folders, and from folders of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from revit.data import DataError, DataOptions, DataSpec
from revit.models import create_model, from_pretrained
from revit.models.model_config import has_config, shipped
from revit.training.checkpoint import MANIFEST, Checkpoint, CheckpointError, read_checkpoint
from revit.training.recipe import ModelOptions, Recipe, RecipeError, read_recipe
from revit.training.run_folder import RunError
from revit.weight_files import precision

TRAINED = "folder of a run, checkpoint or weights, or a model whose weights come with the package"


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what it was trained on."""

    path: Path  # the run folder, or the checkpoint or the weights if only that is there
    model: nn.Module
    spec: DataSpec
    group: str
    recipe: dict[str, Any]  # of weights only which model and which data
    data_root: str | None  # where its data was, if the run folder knows
    checkpoint: Checkpoint | None  # none if it came as weights


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


def find_trained(text: str) -> Path:
    """The folder that a text names: a path, or a model whose weights come with the package."""
    path = Path(text).expanduser()
    return path if path.exists() else shipped().get(text, path)


def is_weights(path: Path) -> bool:
    """Whether a folder is one of `save_pretrained`, and neither a run nor a checkpoint."""
    return has_config(path) and not (path / MANIFEST).exists() and not (path / "checkpoints").exists()


def load_run(path: Path, which: str = "best") -> LoadedRun:
    """The model of a run folder, of one checkpoint folder of it, or of a folder of weights that says what its images are."""
    if is_weights(path):
        return _load_weights(path, which)
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
    model.to(precision(checkpoint.model))
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: weights of another model ({' '.join(str(error).split()[:40])})") from error
    config = path / "config.yaml"
    root = read_recipe(config)["data"].get("root") if config.is_file() else None
    return LoadedRun(path, model.eval(), spec, options.group, recipe, root, checkpoint)


def bit_exact_model(run: LoadedRun) -> nn.Module:
    """Its model in bit-exact mode, one image at a time: an answer then depends on nothing but its image."""
    model: Any = run.model
    return model.bit_exact(one_by_one=True)


def _load_weights(path: Path, which: str) -> LoadedRun:
    if which != "best":
        raise RunError(f"{path}: weights have no checkpoint {which!r}; leave --checkpoint out")
    model: Any = from_pretrained(path)
    facts = {"name": "folder", "source": "unknown data", "centre": 1.0} | (model.config.data or {})
    missing = [key for key in ("classes", "mean", "std", "size") if key not in facts]
    if missing:
        raise RunError(
            f"{path}: its config.json does not say the {missing[0]} of its images; save it with data=, or name a run"
        )
    try:
        spec = DataSpec.from_dict({**facts, "channels": model.in_chans, "task": getattr(model, "task", "classification")})
    except (DataError, ValueError) as error:
        raise RunError(f"{path}: its config.json: {error}") from error
    group = model.config.options["group"]
    recipe = {"model": {"name": model.config.model, "group": group}, "data": {"name": spec.name}}
    return LoadedRun(path, model, spec, group, recipe, None, None)


def default_folder(run: LoadedRun, name: str) -> Path:
    """Where results go if nobody says: into the run, but not into a folder of weights, which is kept as it is."""
    return run.path / name if run.checkpoint is not None else Path(name) / run.path.resolve().name


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
