"""Models with their weights in a folder: `model.safetensors`, `config.json` (how to build the model) and `README.md`.

A folder is written whole or not at all, and only if it can be loaded again. What others wrote is hostile: sizes are checked
before anything is read, options before anything is built; a key that is missing, extra or of another shape is refused by name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from revit.deployment import bit_exact
from revit.deployment.canonical import BitExact
from revit.groups import Group
from revit.models.card import model_card
from revit.models.hub import download, upload
from revit.models.model_config import (
    FORMAT,
    ModelConfig,
    PretrainedError,
    check_options,
    checked_data,
    printable,
    read_config,
    shorten,
)
from revit.models.registry import build_model, create_model
from revit.weight_files import (
    CONFIG,
    MAX_TENSOR_BYTES,
    MODEL,
    WeightFileError,
    parse_metadata,
    parse_tensors,
    precision,
    read_bytes,
    tensor_bytes,
    write_folder,
)

CARD = "README.md"
FREE = frozenset({"num_classes", "drop_rate", "attn_drop_rate", "drop_path_rate", "strict"})
"""Options that may differ from those that the weights were trained with."""
SPARE_NUMBERS, SPARE_TENSORS = 1_000_000, 100
"""What may be built beyond twice what a file holds: some builders make parts that they then replace."""


class Pretrained:
    """What every model made by `create_model` can do. `config` says what it was built from."""

    config: ModelConfig | None = None

    def save_pretrained(
        self, folder: str | Path, *, data: Mapping[str, Any] | None = None, results: Mapping[str, Any] | None = None
    ) -> None:
        """Writes weights, config and model card into a folder; see `save_pretrained`."""
        save_pretrained(self, folder, data=data, results=results)

    @classmethod
    def from_pretrained(cls, source: str | Path, **arguments: Any) -> Self:
        """The model of a folder or hub repository, which must be of this class; see `from_pretrained`."""
        model = from_pretrained(source, **arguments)
        if not isinstance(model, cls):
            raise PretrainedError(f"{source}: holds a {type(model).__name__}, not a {cls.__name__}; use revit.from_pretrained")
        return model

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        data: Mapping[str, Any] | None = None,
        results: Mapping[str, Any] | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes to a repository of the Hugging Face hub. Returns its address."""
        return upload(repo_id, _contents(self, data, results), private=private)

    def bit_exact(self: Any, *, one_by_one: bool = False) -> BitExact:
        """A deployed copy whose answers stay the same under turns and mirrors, to the last bit; see `revit.bit_exact`."""
        return bit_exact(self, one_by_one=one_by_one)


def save_pretrained(
    model: Any, folder: str | Path, *, data: Mapping[str, Any] | None = None, results: Mapping[str, Any] | None = None
) -> None:
    """Writes a model made by `create_model` into a folder.

    `data` says what its images are: `classes`, `mean` and `std` of their channels, `size` (as `DataSpec.to_dict()`); by default
    what is known already. `results` are the scores of a run (`test.json`), for the model card. A folder that holds anything
    but an older model is left alone.
    """
    path = Path(folder).expanduser().resolve()
    if path.exists():
        foreign = sorted({entry.name for entry in path.iterdir()} - {MODEL, CONFIG, CARD}) if path.is_dir() else [path.name]
        if foreign:
            raise PretrainedError(f"{folder}: holds {foreign[0]}, which is no part of a model; choose another folder")
    contents = _contents(model, data, results)
    try:
        write_folder(path, contents)
    except OSError as error:
        raise PretrainedError(f"{folder}: cannot be written ({error.strerror}); nothing was changed") from error


def from_pretrained(source: str | Path, *, revision: str | None = None, **arguments: Any) -> nn.Module:
    """The model of a folder, or of a repository `owner/name` of the Hugging Face hub, in eval mode.

    `arguments` are those of `create_model`: `features_only`, and options, which must be those of the weights, except for
    dropout rates, `strict`, and `num_classes`, which gives a fresh classifier. `model.config.data` has the classes and the
    normalisation, where they are known.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = download(str(source), (CONFIG, MODEL), revision)
    return create_model(read_config(folder).model, pretrained=folder, **arguments)


def load_folder(folder: Path, name: str, overrides: Mapping[str, Any]) -> nn.Module:
    """The model of a folder, which must be the named one, with its weights, in eval mode."""
    config = read_config(folder)
    if config.model != name:
        raise PretrainedError(f"{folder}: holds weights of {config.model}, not of {name}")
    options = _merged(config, overrides, folder)
    data = _read(folder / MODEL)
    tensors = _parsed(data, folder / MODEL)
    known = parse_metadata(data).get("group", config.options["group"])
    if known != config.options["group"]:
        raise PretrainedError(
            f"{folder}: {CONFIG} is of the group {printable(config.options['group'])}, the weights are of {printable(known)}"
        )
    try:
        with _at_most(tensors), torch.random.fork_rng(devices=[]):
            model: Any = build_model(name, {**options, "num_classes": config.options["num_classes"]})
    except Exception as error:  # whatever a constructor raises for options that nobody would choose
        raise PretrainedError(f"{folder / CONFIG}: its options build no {name} ({shorten(error)})") from error
    model.to(precision(tensors))
    _check_tensors(tensors, model.state_dict(), folder / MODEL)
    model.load_state_dict(tensors)
    facts = config.data
    if options["num_classes"] != config.options["num_classes"]:
        model.reset_classifier(options["num_classes"])
        facts = {key: value for key, value in (facts or {}).items() if key != "classes"} or None
    model.config = ModelConfig(name, options, facts)
    return model.eval()


def _contents(model: Any, data: Mapping[str, Any] | None, results: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files of a model, which were seen to fit each other."""
    known: ModelConfig | None = getattr(model, "config", None)
    kind = type(model).__name__
    if not isinstance(known, ModelConfig):
        raise PretrainedError(f"this {kind} was not made by create_model, so nothing says how to build it again")
    group, in_chans, num_classes = model.group.name, model.in_chans, model.num_classes
    options = {**known.options, "group": group, "in_chans": in_chans, "num_classes": num_classes}
    facts = dict(data) if data is not None else dict(known.data or {})
    if data is None and len(facts.get("classes") or ()) != num_classes:
        facts.pop("classes", None)  # of the classifier before
    try:
        options, facts = json.loads(json.dumps([options, facts or None]))
    except TypeError as error:
        raise PretrainedError(f"this {kind} cannot be described in JSON: {error}") from error
    where = Path(known.model)
    check_options(options, where)
    config = ModelConfig(known.model, options, checked_data(facts, options, where))
    state = model.state_dict()
    with torch.random.fork_rng(devices=[]):
        again = build_model(known.model, options).to(next(model.parameters()).dtype)
    try:
        _check_tensors(state, again.state_dict(), where)
    except PretrainedError as error:
        raise PretrainedError(f"this {kind} is not as create_model makes it (deployed, pruned, diverged?): {error}") from error
    values = {"library_name": "revit", "format": FORMAT, "model": config.model, "options": config.options, "data": config.data}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        MODEL: tensor_bytes(state, {"format": "pt", "model": config.model, "group": group}),
        CONFIG: json.dumps(values, indent=1, allow_nan=False).encode(),
        CARD: model_card(config, parameters, results).encode(),
    }


def _merged(config: ModelConfig, overrides: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options of the weights, with what may differ."""
    for key, value in overrides.items():
        given = Group.parse(value).name if key == "group" else list(value) if isinstance(value, tuple) else value
        if key not in FREE and (key not in config.options or config.options[key] != given):
            had = f"{key}={config.options[key]!r}" if key in config.options else f"no {key} of their own"
            raise PretrainedError(f"{folder}: these weights have {had}, got {key}={value!r}; leave it out")
    return {**config.options, **overrides, "group": config.options["group"]}


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: Path) -> None:
    """Refuses, by name, keys that are missing or extra, other shapes and types, and what is no number."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{printable(name)} is not of this model" for name in found if name not in expected]
    for name in (name for name in expected if name in found):
        has, needs = found[name], expected[name]
        if has.shape != needs.shape:
            wrong.append(f"{name} has shape {list(has.shape)} instead of {list(needs.shape)}")
        elif has.dtype != needs.dtype:
            wrong.append(f"{name} is of type {has.dtype} instead of {needs.dtype}")
        elif has.is_floating_point() and not torch.isfinite(has).all():
            wrong.append(f"{name} holds NaN or infinity")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PretrainedError(f"{where}: {'; '.join(text[:200] for text in wrong[:3])}{more}")


@contextmanager
def _at_most(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Ends the building of a model that gets much larger than these tensors: options can ask for any size."""
    numbers = 2 * sum(tensor.numel() for tensor in tensors.values()) + SPARE_NUMBERS
    count, thread = 2 * len(tensors) + SPARE_TENSORS, threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal numbers, count
        if parameter is not None and threading.get_ident() == thread:
            numbers, count = numbers - parameter.numel(), count - 1
            if numbers < 0 or count < 0:
                raise ValueError("a model much larger than the weights")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_TENSOR_BYTES)
    except WeightFileError as error:
        raise PretrainedError(str(error)) from error


def _parsed(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return parse_tensors(data, path)
    except WeightFileError as error:
        raise PretrainedError(str(error)) from error
