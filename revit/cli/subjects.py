"""What can be audited: a run, weights, an ONNX or TorchScript file, a function of yours that builds a model, or its name."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from revit.cli.model_files import OnnxModel, ScriptModel
from revit.cli.runs import LoadedRun, find_trained, is_weights, load_run
from revit.data.image_files import printable
from revit.data.spec import DataSpec
from revit.groups import Group
from revit.models import create_model, from_pretrained, list_models
from revit.models.model_config import read_config, shipped
from revit.training.checkpoint import MANIFEST
from revit.training.recipe import ModelOptions

SCRIPT_SUFFIXES = (".pt", ".pth", ".ts", ".jit", ".torchscript")
KINDS = "a run or weights folder, an .onnx or TorchScript (.pt) file, package.module:factory or the name of a model"


class SubjectError(ValueError):
    """A text that stands for nothing that could be audited. The message names it and says what to do."""


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, and what is known of it."""

    label: str  # what the report calls it
    model: nn.Module
    group: str | None  # its own group, if it has one: z2, the identity alone, is none
    spec: DataSpec | None  # what it was trained on, for runs
    run: LoadedRun | None


def open_subject(
    text: str, options: ModelOptions | None = None, *, in_chans: int, num_classes: int, checkpoint: str = "best"
) -> Subject:
    """The model that a text stands for. The first that fits: a folder of a run, checkpoint or weights, a file,
    `package.module:factory`, the name of a registered model, of weights in the package. A registered model has random weights,
    and is built with the options, or its own defaults, for so many channels and classes.

    A factory and a TorchScript file are code, and are run: name only those that you trust. Pickles are not loaded.
    """
    path = Path(text).expanduser()
    suffix = path.suffix.lower()
    if is_trained(text):
        return _trained(find_trained(text), checkpoint)
    if suffix == ".onnx":
        return _file(path, OnnxModel(path))
    if suffix in SCRIPT_SUFFIXES:
        return _file(path, ScriptModel(path))
    if path.exists() and not path.is_dir():
        raise SubjectError(f"{printable(text)}: not the file of a model that can be run; give {KINDS}")
    if ":" in text:
        model = _made(text).eval()
        return Subject(printable(text), model, _group_of(model), None, None)
    if text in list_models():
        arguments = options.arguments() if options is not None else {}
        model = create_model(text, in_chans=in_chans, num_classes=num_classes, **arguments).eval()
        group = _group_of(model)
        return Subject(" ".join((text, *filter(None, [group]), "untrained")), model, group, None, None)
    raise SubjectError(f"{printable(text)}: {_nearest(text)}")


def is_trained(text: str) -> bool:
    """Whether a text names a folder with weights, or weights in the package. A model hides an ordinary folder of its name."""
    path = find_trained(text)
    if text in list_models():
        return (path / MANIFEST).is_file() or (path / "checkpoints").is_dir() or is_weights(path)
    return path.is_dir()


def _trained(path: Path, checkpoint: str) -> Subject:
    label = printable(path.name if path in shipped().values() else path)
    if is_weights(path) and read_config(path).data is None:
        model = from_pretrained(path)
        return Subject(label, model, _group_of(model), None, None)
    run = load_run(path, checkpoint)
    if checkpoint != "best" and run.checkpoint is not None:
        label = printable(run.checkpoint.path)
    return Subject(label, run.model, _known_group(run.group), run.spec, run)


def _file(path: Path, model: nn.Module) -> Subject:
    return Subject(printable(path.name), model.eval(), None, None, None)


def _group_of(model: nn.Module) -> str | None:
    """The group that a model says it has. Others may call anything a group."""
    return _known_group(getattr(model, "group", None))


def _known_group(value: object) -> str | None:
    try:
        group = Group.parse(value) if isinstance(value, str | Group) else None
    except ValueError:
        return None
    return group.name if group is not None and group.order > 1 else None


def _made(text: str) -> nn.Module:
    """What `package.module:factory` gives: a module, or what a class or function makes without arguments."""
    module_name, _, attribute = text.partition(":")
    shown = printable(text)
    if module_name.endswith(".py") and os.path.isfile(module_name):
        dotted = os.path.relpath(module_name).removesuffix(".py").replace(os.sep, ".")
        raise SubjectError(f"{shown}: not of the form package.module:factory; write {printable(dotted)}:{printable(attribute)}")
    if not all(name.isidentifier() for name in (*module_name.split("."), *attribute.split("."))):
        raise SubjectError(f"{shown}: not of the form package.module:factory")
    found = _attribute(_module(module_name, shown), attribute, shown)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise SubjectError(f"{shown}: a {type(found).__name__}, not a module or a function that makes one")
    try:
        model = found()
    except (Exception, SystemExit) as error:
        raise SubjectError(f"{shown}: raised {_said(error)}; it is called without arguments") from error
    if not isinstance(model, nn.Module):
        raise SubjectError(f"{shown}: returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _module(name: str, shown: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:  # it stays: models import the rest of their code when they need it
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise SubjectError(
                f"{shown}: no module {error.name}, neither in this folder nor installed; go to the folder that holds it"
            ) from error
        raise SubjectError(f"{shown}: importing {name} needs {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise SubjectError(f"{shown}: importing {name} raised {_said(error)}") from error


def _attribute(module: Any, path: str, shown: str) -> Any:
    found = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            names = [other for other in dir(found) if not other.startswith("_")]
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise SubjectError(f"{shown}: {getattr(found, '__name__', 'it')} has no {name}{hint}") from error
    return found


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ + (f": {printable(text.encode('utf-8', 'replace').decode())}" if text else "")


def _nearest(text: str) -> str:
    if os.sep in text:
        return f"no such file or folder; give {KINDS}"
    near = difflib.get_close_matches(text, list_models(), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"give {KINDS};"
    return f"no folder, file or model of this name; {hint} `revit models` lists all models"
