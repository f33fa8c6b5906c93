"""The model card: what a folder of weights is, how to load it, and what it was measured to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from revit.models.model_config import ModelConfig

SHOWN_CLASSES = 20
ROWS = {
    "accuracy": ("test accuracy", "{:.2%}"),
    "balanced_accuracy": ("balanced accuracy", "{:.2%}"),
    "mean_iou": ("mean IoU", "{:.2%}"),
    "auroc": ("AUROC", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "calibration_error": ("calibration error", "{:.2%}"),
    "images": ("test images", "{:,}"),
    "consistency_percent": ("predictions that stay under the group", "{:.2f} %"),
    "equivariance_error": ("largest relative change of the logits under the group", "{:.1e}"),
    "validation_accuracy": ("validation accuracy", "{:.2%}"),
    "epochs": ("epochs of training", "{:,}"),
    "training_seconds": ("seconds of training", "{:,.0f}"),
    "seed": ("seed", "{}"),
}
"""What is shown of the results of a run, in this order."""


def model_card(config: ModelConfig, parameters: int, results: Mapping[str, Any] | None) -> str:
    """Markdown with the header that the hub reads. Without results it says that there are none."""
    options = config.options
    facts = {
        "model": f"`{config.model}`",
        "group": f"`{options['group']}`",
        "parameters": f"{parameters:,}",
        "input": _input(config),
        "classes": _classes(config),
        "trained on": plain((config.data or {}).get("source") or "not stated"),
        "options": " ".join(f"`{plain(key)}={plain(value)}`" for key, value in options.items()),
    }
    lines = [
        "---", "library_name: revit", "tags: [image, equivariance, rotation, vision-transformer]", "---",
        f"# {config.model}, {options['group']}", "",
        _symmetry(options["group"]), "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), "",
        "```python", "import revit", "", 'model = revit.from_pretrained("FOLDER_OR_REPOSITORY")  # in eval mode',
        "model.config.data  # classes, and the normalisation of images, whose values are between 0 and 1", "```", "",
        "## Results", "",
    ]  # fmt: skip
    return "\n".join(lines + _results(results)) + "\n"


def _symmetry(group: str) -> str:
    if group == "z2":
        return "A vision model that is equivariant to nothing, for comparison."
    moves = "rotations and mirrors" if group.endswith("m") else "rotations"
    return f"A vision model that is equivariant to the {moves} of `{group}`: its maps turn with the image, its classes stay."


def _results(results: Mapping[str, Any] | None) -> list[str]:
    if not results:
        return ["None were given when these weights were saved."]
    rows = [(name, form.format(results[key])) for key, (name, form) in ROWS.items() if results.get(key) is not None]
    made = " ".join(_no_path(word) for word in str(results.get("command", "not stated")).split())
    versions = ", ".join(f"{name} {version}" for name, version in (results.get("versions") or {}).items())
    commit, device = results.get("commit", "unknown"), results.get("device", "unknown")
    return [
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), "",
        f"Written from the results of the run: `{plain(made)}`, commit {plain(commit)}, {plain(versions)}, on {plain(device)}."
        " Validation chose the epoch; the test images were read once.",
    ]  # fmt: skip


def _input(config: ModelConfig) -> str:
    data, channels = config.data or {}, config.options["in_chans"]
    text = f"{channels} channel{'s' * (channels != 1)}"
    if "size" in data:
        text += f", {data['size'][0]} x {data['size'][1]} pixels"
    if "mean" in data and "std" in data:
        text += f", mean {plain(data['mean'])}, deviation {plain(data['std'])}"
    return text


def _classes(config: ModelConfig) -> str:
    names, count = (config.data or {}).get("classes"), config.options["num_classes"]
    if not names:
        return f"{count}, not named"
    shown = ", ".join(plain(name) for name in names[:SHOWN_CLASSES])
    return f"{count}: {shown}{', ...' * (count > SHOWN_CLASSES)}"


def plain(value: object) -> str:
    """A text of others inside a table: one line, without what Markdown and HTML would act on."""
    return re.sub(r"[^\w .,:;=+*/()'%@#~-]+", " ", str(value)).strip()


def _no_path(word: str) -> str:
    """A word of a command without the folders of the machine that it ran on."""
    option, equals, value = word.rpartition("=")
    return option + equals + (PurePath(value).name if value.startswith(("/", "~")) else value)
