"""`revit demo` without its page: who is asked, and how it refuses. The page is in `test_demo_browser.py`."""

import socket
import sys
import types

import pytest
import torch

from revit.cli.demo import Table, build_page
from revit.cli.runs import load_run
from revit.evaluation.playground import ask, fit_picture
from tests.training.runs import toy


def test_gradio_missing_is_one_line(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert fails("demo") == "error: the page needs gradio: pip install 'revit-torch[train,demo]'"


@pytest.fixture
def gradio(monkeypatch):
    """Something to import; nothing of it is reached before bad input is refused."""
    monkeypatch.setitem(sys.modules, "gradio", types.ModuleType("gradio"))


def test_bad_input_is_one_line(fails, gradio):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fails("demo", "--port", str(port))
    assert message == f"error: port {port} cannot be used (Address already in use); choose another with --port"
    assert fails("demo", "--port", "0") == "error: --port is a number from 1 to 65535, got 0"
    assert fails("demo", "nowhere", "--port", str(port)).startswith("error: nowhere: no run with a checkpoint")
    assert fails("demo", "--prot", "1") == "error: unknown option --prot; did you mean --port?"


def test_random_weights_are_called_that():
    table = Table()
    assert table.names and all("random weights" in name or "trained" in name for name in table.names)
    name = next(name for name in table.names if "p4m, random" in name)
    before = torch.get_rng_state()
    ours, plain = table.players(name)
    assert torch.equal(before, torch.get_rng_state())
    assert "random weights" in ours.label and "random weights" in plain.label and plain.group.order == 1
    assert table.players(name)[0] is ours  # built once
    x = [fit_picture(toy(1).read(0), player.spec) for player in (ours, plain)]
    assert ask(ours, x[0], 90, True).change < 1e-5 < 1e-2 < ask(plain, x[1], 90, True).change


def test_a_run_comes_first(run):
    table = Table(load_run(run), load_run(run))
    assert table.names[0] == "runs/one: revit_tiny p4"
    ours, plain = table.players(table.names[0])
    assert ours.spec.classes == ("dark", "bright", "striped") and plain.label == ours.label
    assert Table(load_run(run)).players(table.names[0])[1].label == "plain ViT, random weights"


class Recorder:
    """Stands for gradio: remembers what a page is made of."""

    def __init__(self):
        self.calls = {}

    def __getattr__(self, name):
        def call(*words, **options):
            self.calls.setdefault(name, []).append((words, options))
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_the_page_answers_and_excuses_itself(tmp_path):
    """The function behind the page: an answer, a message for what is no image, and for an unknown model."""
    recorder, table = Recorder(), Table()
    build_page(recorder, table, toy(3))
    (((_, show, *_), _),) = recorder.calls["on"]
    name = table.names[0]
    assert 'class="prediction"' in show(name, None, 4, 90, True)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    assert 'role="alert">bad.png: not an image that can be read' in show(name, str(bad), 0, 0, False)
    assert "unknown model" in show("other", None, 0, 0, False)
    build_page(empty := Recorder(), table, None)
    assert "Drop an image to begin" in empty.calls["on"][0][0][1](name, None, 0, 0, False)
    assert recorder.calls["Blocks"][0][1]["analytics_enabled"] is False
