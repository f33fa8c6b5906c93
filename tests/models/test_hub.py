"""The hub, without a network: what is asked of huggingface_hub, that it has it, and what happens without it."""

import inspect
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from revit import from_pretrained
from revit.models.hub import HubError
from tests.models.test_pretrained import tiny


class FakeApi:
    """A hub in a folder. Each call must be one that the real API takes."""

    def __init__(self, root, real):
        self.root, self.real = root, real

    def __getattr__(self, name):
        def call(*positional, **named):
            inspect.signature(getattr(self.real, name)).bind(self, *positional, **named)
            return getattr(self, f"_{name}")(*positional, **named)

        return call

    def _create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        return f"hub:{repo_id}{' private' * private}"

    def _upload_folder(self, *, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)

    def _get_paths_info(self, repo_id, paths, revision):
        found = [self.root / repo_id / path for path in paths]
        return [types.SimpleNamespace(path=path.name, size=path.stat().st_size) for path in found]

    def _hf_hub_download(self, repo_id, filename, revision):
        path = self.root / repo_id / filename
        if not path.is_file():
            raise FileNotFoundError(f"404\nno {repo_id}")
        return str(path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    module = types.ModuleType("huggingface_hub")
    real = pytest.importorskip("huggingface_hub").HfApi
    module.HfApi = lambda: FakeApi(tmp_path / "hub", real)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_push_and_load(hub):
    model, x = tiny(), torch.randn(2, 1, 8, 8)
    assert model.push_to_hub("me/toy", private=True) == "hub:me/toy private"
    assert {path.name for path in (hub / "me/toy").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    loaded = from_pretrained("me/toy", revision="main")
    assert torch.equal(loaded(x), model(x))
    model.save_pretrained("me/toy")  # a folder of that name comes first
    Path(hub / "me/toy/config.json").unlink()
    from_pretrained("me/toy")


def test_what_the_hub_cannot_give(hub, monkeypatch):
    with pytest.raises(HubError, match="me/none: cannot be fetched from the hub .FileNotFoundError: 404 no me/none.$"):
        from_pretrained("me/none")
    tiny().push_to_hub("me/toy")
    monkeypatch.setattr("revit.models.hub.MAX_TENSOR_BYTES", 100)
    with pytest.raises(HubError, match=r"me/toy: config.json has \d+ bytes, at most 100 are read"):
        from_pretrained("me/toy")
    monkeypatch.setattr(FakeApi, "_create_repo", lambda *_, **__: 1 / 0)
    with pytest.raises(HubError, match="me/toy: cannot be uploaded to the hub .ZeroDivisionError"):
        tiny().push_to_hub("me/toy")


@pytest.mark.parametrize("source", ["nothing", "a/b/c", "../secret", "/etc", "me/", "me/.hidden", "https://x/y"])
def test_names_that_are_no_repository(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if source != "/etc":
        with pytest.raises(HubError, match="no such folder, and no repository of the hub, which are called owner/name"):
            from_pretrained(source)
    with pytest.raises(HubError, match="repositories of the hub are called owner/name"):
        tiny().push_to_hub(source)


def test_without_huggingface_hub(tmp_path, monkeypatch):
    """Folders work; a repository gives one line that says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    from_pretrained("model")
    with pytest.raises(HubError, match=r"me/toy: no such folder.*huggingface_hub is needed: pip install huggingface_hub"):
        from_pretrained("me/toy")
    with pytest.raises(HubError, match=r"me/toy: to upload, huggingface_hub is needed"):
        tiny().push_to_hub("me/toy")
