"""One run, one folder, one owner."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from revit.data.spec import DataOptions
from revit.training.recipe import Recipe, TrainOptions
from revit.training.run_folder import RunError, RunFolder, commit


def start(path, recipe=None, *, resume=False):
    with RunFolder(path) as folder:
        folder.start(recipe or Recipe(), resume=resume)


def test_a_fresh_folder_says_what_runs_in_it(tmp_path):
    path = tmp_path / "deep" / "run"
    start(path)
    facts = json.loads((path / "env.json").read_text())
    assert {"command", "commit", "started", "versions", "processes", "threads", "machine", "device"} == set(facts)
    assert (path / "config.yaml").read_text() == Recipe().to_yaml()


def test_a_run_is_not_started_over(tmp_path):
    start(tmp_path)
    with pytest.raises(RunError, match="holds a run already; add --resume to go on with it"):
        start(tmp_path)


def test_another_configuration_is_refused_by_name(tmp_path):
    start(tmp_path)
    with pytest.raises(RunError, match=r"another configuration: train.lr \(0.003, now 0.5\); train.seed \(0, now 3\)"):
        start(tmp_path, Recipe(train=TrainOptions(lr=0.5, seed=3)), resume=True)


def test_a_change_is_allowed_by_its_name(tmp_path, monkeypatch):
    start(tmp_path)
    other = Recipe(train=TrainOptions(lr=0.5, seed=3))
    with RunFolder(tmp_path) as folder, pytest.raises(RunError, match=r"train.seed \(0, now 3\).*--allow-change train.seed"):
        folder.start(other, resume=True, may_change=frozenset({"train.lr"}))
    with RunFolder(tmp_path) as folder:
        folder.start(other, resume=True, may_change=frozenset({"train.lr", "train.seed"}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with RunFolder(tmp_path) as folder, pytest.raises(RunError, match=r"processes \(1, now 2\).*--allow-change processes"):
        folder.start(other, resume=True)
    with RunFolder(tmp_path) as folder:
        folder.start(other, resume=True, may_change=frozenset({"processes"}))


def test_a_folder_that_vanishes_is_made_anew(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.start(Recipe(), resume=False)
        assert not folder.vanished()
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # what a save may have left there meanwhile
        assert folder.vanished() and not folder.vanished()
        assert (tmp_path / "run" / "config.yaml").read_text() == Recipe().to_yaml()
        with pytest.raises(RunError, match="in use by process"):
            start(tmp_path / "run", resume=True)
        (tmp_path / "run").rename(tmp_path / "again")
        start(tmp_path / "run", Recipe(train=TrainOptions(seed=3)))
        with pytest.raises(RunError, match="taken by another run while this one was using it"):
            folder.vanished()


def test_what_does_not_change_the_result_may_change(tmp_path):
    start(tmp_path)
    moved = Recipe(data=DataOptions(root="/elsewhere", workers=3), train=TrainOptions(save_seconds=5))
    start(tmp_path, moved, resume=True)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="holds thesis.tex and no run"):
        start(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_damaged_configuration_is_named(tmp_path):
    start(tmp_path)
    (tmp_path / "config.yaml").write_text("model: [")
    with pytest.raises(RunError, match=r"config.yaml: damaged"):
        start(tmp_path, Recipe(), resume=True)


def test_two_runs_in_one_folder_and_a_dead_owner(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom revit.training.recipe import Recipe\n"
        "from revit.training.run_folder import RunFolder\nfolder = RunFolder(Path(sys.argv[1]))\n"
        "folder.start(Recipe(), resume=False)\nprint('taken', flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "taken\n"
        with pytest.raises(RunError, match=f"in use by process {owner.pid} on .*; wait for it or choose another --out"):
            start(tmp_path, Recipe(), resume=True)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    start(tmp_path, Recipe(), resume=True)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(self, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(type(tmp_path), "mkdir", refuse)  # a mode would not stop root
    with pytest.raises(RunError, match="cannot be written .Permission denied.; choose another --out"):
        start(tmp_path / "run")


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        start(tmp_path / "run")


def test_commit_is_short_or_unknown():
    assert commit() == "unknown" or len(commit().removesuffix("-changed")) >= 7
