"""`revit demo`: a page on this machine to turn an image by hand and watch what a model of ours and a plain ViT make of it."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from revit.cli.parser import Parser, UsageError
from revit.cli.runs import TRAINED, LoadedRun, find_trained, load_run, run_data
from revit.cli.scanning import open_with_progress
from revit.data import DataError, DataOptions, DataSpec, Images, open_dataset
from revit.data.image_files import ImageBytes, printable
from revit.data.randomness import permutation
from revit.evaluation.playground import Player, fit_picture, message_html, page_html, read_picture
from revit.groups import Group
from revit.models import create_model, list_models

USAGE = "[RUN] [--plain RUN] [--port N] [--share]"
ABOUT = """Opens a page on this machine: drop an image, turn and mirror it, and watch the prediction stay and the features turn,
next to a plain ViT that owes nothing. It shows the run that is named, the weights that come with the package, and models with
random weights. Nothing is loaded from a network, and nothing leaves this machine unless --share asks for it. Ctrl-C ends it."""
HOST, PORT, LARGEST_FILE = "127.0.0.1", 7860, "64mb"
RANDOM = (("revit_tiny", "p4m"), ("revit_tiny", "p4"), ("revit_tiny", "p8"))
PICTURES = DataSpec("pictures", 3, (28, 28), tuple(f"class {i}" for i in range(10)), (0.5,) * 3, (0.25,) * 3, "any image")
INTRODUCTION = """# Turn it

Drop an image, or take one of ours, then turn and mirror it. **{promise}**"""
CSS = """
.turned { display: grid; grid-template-columns: minmax(9rem, 1fr) 3fr 3fr; gap: 1.5rem; align-items: start }
.turned figure { margin: 0 } .turned figcaption { font-size: .8rem; opacity: .75; margin-top: .3rem }
.turned img { image-rendering: pixelated } .turned > figure img { width: 100% } .turned section img { max-width: 100% }
.turned h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere } .turned p { margin: .25rem 0 }
.turned .prediction { font-size: 1.5rem; font-weight: 600; overflow-wrap: anywhere }
.turned .verdict.same { color: #00734f } .turned .verdict.other { color: #b34700; font-weight: 600 }
.dark .turned .verdict.same { color: #3ad6a4 } .dark .turned .verdict.other { color: #ff9d57 }
.turned .change, .turned .promise { font-size: .85rem; opacity: .85 }
.turned .bar { display: grid; grid-template-columns: 6rem 1fr 4rem; gap: .5rem; align-items: center; font-size: .85rem }
.turned .bar span:first-child { overflow: hidden; text-overflow: ellipsis } .turned meter { width: 100% }
.turned section figure { margin-top: .75rem }
.message { color: #b34700; font-weight: 600 } .dark .message { color: #ff9d57 }
@media (max-width: 700px) { .turned { grid-template-columns: 1fr } .turned > figure img { width: 9rem } }
"""


def run(words: list[str]) -> int:
    parser = Parser("demo", USAGE, ABOUT)
    parser.add_argument("run", metavar="RUN", nargs="?", type=str, help=f"{TRAINED} to show first")
    parser.add_argument("--plain", metavar="RUN", type=str, help="run of the model beside it (default: a plain ViT)")
    parser.add_argument("--port", metavar="N", type=int, default=PORT, help="port on this machine")
    parser.add_argument("--share", action="store_true", help="also open it to all who have the link, through gradio's server")
    options = parser.parse_args(words)
    gradio = _gradio()
    _check_port(options.port)
    own, plain = (load_run(find_trained(path)) if path else None for path in (options.run, options.plain))
    table = Table(own, plain)
    blocks = build_page(gradio, table, _samples(own))
    try:
        _, local, shared = blocks.launch(
            server_name=HOST, server_port=options.port, share=options.share, prevent_thread_lock=True, quiet=True,
            ssr_mode=False, footer_links=[], max_file_size=LARGEST_FILE, css=CSS, theme=_theme(gradio),
        )  # fmt: skip
    except OSError as error:  # taken since we looked
        raise UsageError(f"port {options.port} cannot be used ({error}); choose another with --port") from error
    print(f"{shared or local}  (Ctrl-C ends it)", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        blocks.close(verbose=False)
    return 0


class Table:
    """Who can be asked: by the name in the list, a model of ours and the plain one beside it. Models are built when chosen."""

    def __init__(self, run: LoadedRun | None = None, plain: LoadedRun | None = None) -> None:
        self.plain = plain
        self.builders: dict[str, Callable[[], Player]] = {}
        if run is not None:
            self.builders[_run_label(run)] = partial(_run_player, run)
        for name in list_models(pretrained=True):
            if self._shipped(name).group.order > 1:
                self.builders[f"{name}, trained"] = partial(self._shipped, name)
        for name, group in RANDOM:
            label = f"{name} {group}, random weights"
            self.builders[label] = partial(_random_player, label, name, PICTURES, group=group)
        self.seated: dict[str, tuple[Player, Player]] = {}

    @property
    def names(self) -> list[str]:
        return list(self.builders)

    def players(self, name: str) -> tuple[Player, Player]:
        if name not in self.builders:
            raise UsageError(f"unknown model {printable(str(name))!r}; choose {', '.join(self.names)}")
        if name not in self.seated:
            ours = self.builders[name]()
            self.seated[name] = ours, self._beside(ours.spec)
        return self.seated[name]

    def _shipped(self, name: str) -> Player:
        model: Any = create_model(name, pretrained=True)
        return Player(f"{name}, trained", model, DataSpec.from_dict(model.config.data), Group.parse(model.group))

    def _beside(self, spec: DataSpec) -> Player:
        """The plain model: the run that was named, or trained weights of the package for such images, or random ones."""
        if self.plain is not None:
            return _run_player(self.plain)
        for name in list_models(pretrained=True):
            player = self._shipped(name)
            if player.group.order == 1 and (player.spec.channels, player.spec.classes) == (spec.channels, spec.classes):
                return player
        side = 28 if max(spec.size) <= 32 else 56
        plain = replace(spec, size=(side, side), task="classification")
        player = _random_player("plain ViT, random weights", "vit_tiny", plain, img_size=side, patch_size=side // 7)
        _unit_gain(player.model)
        return player


def build_page(gradio: Any, table: Table, samples: Images | None) -> Any:
    """The page: controls, and one piece of HTML that is made anew for every turn."""
    order = [] if samples is None else permutation(len(samples), 0, "demo").tolist()  # datasets are often sorted by class

    def show(name: str, file: str | None, sample: int, degrees: float, mirrored: bool) -> str:
        try:
            players = table.players(name)
            if file is not None:
                source = ImageBytes(Path(file).read_bytes(), printable(Path(file).name))
                images = [read_picture(source, player.spec) for player in players]
            elif samples is not None:
                pixels = samples.read(order[sample % len(order)])
                images = [fit_picture(pixels, player.spec) for player in players]
            else:
                return message_html("Drop an image to begin.")
            return page_html(players, images, degrees, mirrored)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            return message_html(" ".join(str(error).split()) or type(error).__name__)

    with gradio.Blocks(title="revit: turn it", analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        gradio.Markdown(INTRODUCTION.format(promise="A model on a group must not change its mind; a plain ViT may."))
        with gradio.Row():
            with gradio.Column(scale=1, min_width=220):
                file = gradio.File(label="Image", height=130, elem_id="file")
                another = gradio.Button("Another of ours", visible=samples is not None, elem_id="another", size="sm")
            with gradio.Column(scale=2, min_width=300):
                model = gradio.Dropdown(table.names, value=table.names[0], label="Model", elem_id="model")
                degrees = gradio.Slider(0, 360, value=0, step=5, label="Turn (degrees, counter-clockwise)", elem_id="degrees")
                with gradio.Row():
                    quarters = [gradio.Button(f"{angle}°", size="sm", min_width=60) for angle in (0, 90, 180, 270)]
                mirrored = gradio.Checkbox(label="Mirror it first", elem_id="mirrored")
        answers = gradio.HTML(elem_id="answers")
        sample = gradio.State(0)
        inputs, quick = [model, file, sample, degrees, mirrored], {"show_progress": "hidden", "api_visibility": "private"}
        changes = [blocks.load, model.change, file.change, degrees.change, mirrored.change]
        gradio.on(changes, show, inputs, answers, trigger_mode="always_last", **quick)
        another.click(lambda i: (i + 1, None), sample, [sample, file], **quick).then(show, inputs, answers, **quick)
        for button, angle in zip(quarters, (0, 90, 180, 270), strict=True):
            button.click(lambda angle=angle: angle, None, degrees, **quick)
    return blocks


def _gradio() -> Any:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")
    try:
        return importlib.import_module("gradio")
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UsageError("the page needs gradio: pip install 'revit-torch[train,demo]'") from error


def _theme(gradio: Any) -> Any:
    """Fonts of the reader's machine: others would be fetched."""
    return gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise UsageError(f"--port is a number from 1 to 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error


def _samples(run: LoadedRun | None) -> Images | None:
    """Images to begin with: those of the run, if they are still there, or digits of the installation, if it has them."""
    try:
        if run is not None and (run.data_root is not None or run.checkpoint is None):
            return open_with_progress(run_data(run, None, "skip"), Console(stderr=True)).test
    except DataError:
        pass
    try:
        return open_dataset(DataOptions(name="rotmnist5k")).test
    except (DataError, ModuleNotFoundError):
        return None


def _run_label(run: LoadedRun) -> str:
    return f"{printable(run.path)}: {run.recipe['model']['name']} {run.group}"


def _run_player(run: LoadedRun) -> Player:
    return Player(_run_label(run), run.model, run.spec, Group.parse(run.group))


def _random_player(label: str, name: str, spec: DataSpec, **arguments: Any) -> Player:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = create_model(name, in_chans=spec.channels, num_classes=spec.num_classes, **arguments).eval()
    return Player(label, model, spec, Group.parse(model.group))


def _unit_gain(model: nn.Module) -> None:
    """Random weights that keep the size of what they are given, as those of our models do: the tiny ones that a ViT begins its
    training with hardly look at the image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
