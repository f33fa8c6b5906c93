"""`revit COMMAND ...`: the only part that knows all the others."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a recipe of the paper, or a model for your folder of images",
    "eval": "accuracy, per class, confusion matrix and calibration of a run",
    "predict": "images, folders or globs to a CSV of labels and probabilities",
    "audit": "does a model turn with its images? any model: table, pictures, one-page report",
    "export": "a model as an ONNX or torch.export file, compared and audited",
    "convert": "a checkpoint of the authors' released code as one of ours",
    "demo": "a page on this machine: turn an image, watch the prediction stay and the features turn",
    "reproduce": "a table or figure of the paper, ours beside theirs",
    "models": "the models that can be built",
    "recipes": "the recipes that can be trained",
    "data": "which datasets are here, where they came from, a sheet of samples",
    "benchmark": "measure the loader or what models cost on this machine; plan a run on GPUs",
}
MODULES = {"eval": "evaluate", "models": "listing", "recipes": "listing"}
OVERVIEW = """\
usage: revit COMMAND ...

Roto-reflection equivariant vision transformers: train them, evaluate them, use them on images that have no "up".

commands:
{commands}

`revit COMMAND --help` explains one. Start with:

  revit train demo                                        5,000 digits, a few minutes
  revit train folder --data-root my_images --out runs/mine  one folder a class
  revit predict new_images --run runs/mine --out p.csv"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for a run that failed, 2 for bad input, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("\nerror: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `revit models | head`
        return 141
    except Exception as error:
        if os.environ.get("REVIT_DEBUG"):
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS)) + 2
        print(OVERVIEW.format(commands="\n".join(f"  {name:<{width}}{text}" for name, text in COMMANDS.items())))
        return 0
    if words[0] == "--version":
        import revit

        print(f"revit {revit.__version__}")
        return 0
    from revit.cli.parser import UsageError

    if words[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {words[0]!r}; {hint}")
    command = importlib.import_module(f"revit.cli.{MODULES.get(words[0], words[0])}")
    return int(getattr(command, words[0] if words[0] in ("models", "recipes") else "run")(words[1:]))


def _one_line(error: Exception) -> str:
    """The message; for errors that are not ours, what kind they are and how to see more."""
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("revit") or isinstance(error, ValueError):
        return text or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'revit-torch[train]'"
    return f"{type(error).__name__}: {text} (REVIT_DEBUG=1 shows where)"
