"""What TensorBoard reads of a run: every number once, also after a run was killed, and whatever happens to its folder."""

import shutil
import warnings

import pytest

from revit.training.progress import Progress
from revit.training.watchers import TensorBoard


def read(folder):
    """The scalars as TensorBoard has them: {name: [(step, value), ...]}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own dependencies
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def write(watcher, progress, first, last):
    watcher.started(progress, 5)
    for step in range(first, last + 1):
        progress.step = step
        watcher.stepped(progress, 0.5 * step, 0.25)


def test_scalars_by_step_and_epoch(tmp_path):
    watcher = TensorBoard(tmp_path / "tb", every=2)
    write(watcher, Progress(), 1, 5)
    watcher.finished_epoch({"epoch": 1, "train_loss": 1.5, "val_accuracy": 0.75, "seconds": 3.0}, best=True)
    assert read(tmp_path / "tb")["epoch/val_accuracy"] == [(5, 0.75)]  # before it is closed
    watcher.close()
    assert read(tmp_path / "tb") == {
        "train/loss": [(2, 1.0), (4, 2.0)], "train/lr": [(2, 0.25), (4, 0.25)], "epoch/train_loss": [(5, 1.5)],
        "epoch/val_accuracy": [(5, 0.75)],
    }  # fmt: skip


def test_what_was_written_after_the_last_checkpoint_is_replaced(tmp_path):
    killed, resumed = TensorBoard(tmp_path, every=1), TensorBoard(tmp_path, every=1)
    write(killed, Progress(), 1, 4)
    killed.close()
    write(resumed, Progress(step=2), 3, 5)
    resumed.close()
    assert [step for step, _ in read(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("removed", [False, True])
def test_a_folder_that_vanishes_is_no_error(tmp_path, removed):
    watcher = TensorBoard(tmp_path / "run" / "tb", every=1)
    write(watcher, Progress(), 1, 2)
    (tmp_path / "run").rename(tmp_path / "moved")
    if removed:
        shutil.rmtree(tmp_path / "moved")
    watcher.stepped(Progress(step=3), 1.5, 0.25)
    watcher.finished_epoch({"epoch": 1, "train_loss": 1.5}, best=False)
    watcher.close()
    if not removed:
        assert [step for step, _ in read(tmp_path / "moved" / "tb")["train/loss"]] == [1, 2, 3]


def test_a_run_that_never_started_is_closed(tmp_path):
    TensorBoard(tmp_path / "tb").close()
    assert not (tmp_path / "tb").exists()
