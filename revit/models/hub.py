"""The Hugging Face hub: repositories of model folders. Imported when it is needed: local folders do without it."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revit.weight_files import MAX_TENSOR_BYTES

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class HubError(ValueError):
    """A repository that cannot be used. The message names it and says why."""


def download(repo_id: str, names: Sequence[str], revision: str | None = None) -> Path:
    """The folder with these files of a repository, fetched if they are not in the cache of the hub."""
    if not REPOSITORY.fullmatch(repo_id):
        raise HubError(f"{repo_id}: no such folder, and no repository of the hub, which are called owner/name")
    api = _hub(f"{repo_id}: no such folder, and to fetch it as a repository").HfApi()
    _check_sizes(api, repo_id, names, revision)
    try:
        found = [Path(api.hf_hub_download(repo_id, name, revision=revision)) for name in names]
    except Exception as error:  # of the hub, of the network, of the disk: each has its own
        raise HubError(f"{repo_id}: cannot be fetched from the hub ({_short(error)})") from error
    return found[0].parent


def upload(repo_id: str, contents: Mapping[str, bytes], *, private: bool) -> str:
    """Puts files into a repository, which is made if it is not there. Returns its address."""
    if not REPOSITORY.fullmatch(repo_id):
        raise HubError(f"{repo_id}: repositories of the hub are called owner/name")
    api = _hub(f"{repo_id}: to upload").HfApi()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            Path(folder, name).write_bytes(content)
        try:
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload model")
        except Exception as error:
            raise HubError(f"{repo_id}: cannot be uploaded to the hub ({_short(error)})") from error
    return str(address)


def _check_sizes(api: Any, repo_id: str, names: Sequence[str], revision: str | None) -> None:
    """Refuses large files before they are fetched. Without a network the cache may still have them."""
    try:
        files = api.get_paths_info(repo_id, list(names), revision=revision)
    except Exception:  # the download says what is wrong, if the cache cannot help
        return
    for file in files:
        if getattr(file, "size", 0) > MAX_TENSOR_BYTES:
            raise HubError(f"{repo_id}: {file.path} has {file.size:,} bytes, at most {MAX_TENSOR_BYTES:,} are read")


def _hub(purpose: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise HubError(f"{purpose}, huggingface_hub is needed: pip install huggingface_hub") from error


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
