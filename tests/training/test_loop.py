"""The loop: interrupted anywhere it ends with the same bits; it learns; it stops where it must and loses nothing."""

import json
import math
import random

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from revit.data import BadImage
from revit.data.augment import AugmentOptions
from revit.training.checkpoint import read_checkpoint
from revit.training.interrupt import Interrupted, StopRequest
from revit.training.loop import TrainingError
from revit.training.optimizer import optimizer_tensors
from revit.training.progress import Progress
from revit.training.recipe import Recipe
from revit.training.run_folder import RunError
from tests.training.runs import KillAt, Killed, make_training, toy


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch):
    monkeypatch.setattr("revit.weight_files.os.fsync", lambda handle: None)  # these tests die in Python, not in the kernel
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_same_run(path, other):
    for which in ("last", "best"):
        one, two = read_checkpoint(path / "checkpoints" / which), read_checkpoint(other / "checkpoints" / which)
        assert one.model.keys() == two.model.keys() and one.trainer.keys() == two.trainer.keys()
        for name in one.model:
            assert torch.equal(one.model[name], two.model[name]), name
        for name in one.trainer:
            assert torch.equal(one.trainer[name], two.trainer[name]), name
        timing = {"seconds", "images_per_second", "waiting_for_data"}
        histories = [[{k: v for k, v in row.items() if k not in timing} for row in c.state["history"]] for c in (one, two)]
        assert histories[0] == histories[1]


CASES = [
    {},
    {"workers": 2},
    {"ema": 0.9},
    {"ema": 0.9, "workers": 2, "accumulate": 2},
    {"schedule": "cosine", "accumulate": 2},
    {"optimizer": "muon", "ema": 0.9},
    {"optimizer": "group_muon"},
    {"precision": "bf16", "ema": 0.9},
    {"augment": AugmentOptions(rotate=180, shift=1, brightness=0.2, crop_scale=0.5, cutmix=1.0)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interrupted_runs_end_with_the_same_bits(tmp_path, case):
    make_training(tmp_path / "whole", **case).run()
    generator, killed = random.Random(str(case)), 0
    while True:
        watcher = KillAt(generator.randint(1, 5))
        training = make_training(tmp_path / "broken", watcher=watcher, **case, save_seconds=generator.choice([0, 1000]))
        if killed:
            training.resume()
        try:
            training.run()
            break
        except Killed:
            killed += 1
    assert killed >= 2
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_finished_run_trains_no_more(tmp_path):
    first = make_training(tmp_path)
    first.run()
    watcher = KillAt()
    again = make_training(tmp_path, watcher=watcher)
    again.resume()
    again.run()
    assert watcher.losses == [] and len(again.progress.history) == 3


def test_it_learns(tmp_path):
    training = make_training(
        tmp_path, epochs=12, lr=0.02, augment=AugmentOptions(), model={"drop_rate": 0.0, "drop_path_rate": 0.0, "dims": 8}
    )
    progress = training.run()
    assert progress.best["val_accuracy"] >= 0.95
    assert progress.history[-1]["train_loss"] < progress.history[0]["train_loss"]
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,train_loss,train_accuracy,val_loss,val_accuracy,lr") and len(rows) == 13


@pytest.mark.parametrize("parts", [2, 3])
def test_accumulation_is_the_same_step(tmp_path, parts):
    """With layer norm a batch in parts is the batch: same losses and weights, to rounding in float64."""
    still = {"norm": "layer", "drop_rate": 0.0, "drop_path_rate": 0.0}
    weights = []
    for count in (1, parts):
        training = make_training(tmp_path / str(count), accumulate=count, precision="float64", model=still)
        training.run()
        weights.append((training.model.state_dict(), [row["train_loss"] for row in training.progress.history]))
    assert weights[0][1] == pytest.approx(weights[1][1], abs=1e-10)
    for name, value in weights[0][0].items():
        assert torch.allclose(value, weights[1][0][name], atol=1e-8), name


def test_gradient_checkpointing_is_the_same_run(tmp_path):
    states = []
    for enabled in (False, True):
        training = make_training(tmp_path / str(enabled), grad_checkpointing=enabled, epochs=1, precision="float64")
        training.run()
        states.append(training.model.state_dict())
    assert training.model.grad_checkpointing
    for name, value in states[0].items():
        if "running" not in name and "num_batches" not in name:  # the second forward pass counts once more there
            assert torch.allclose(value, states[1][name], atol=1e-9), name


def test_the_average_is_what_is_saved_and_evaluated(tmp_path):
    training = make_training(tmp_path, ema=0.99, epochs=1)
    training.run()
    saved = read_checkpoint(tmp_path / "checkpoints" / "best").model
    for name, value in training.average.module.state_dict().items():
        assert torch.equal(saved[name], value)
    assert any(not torch.equal(saved[name], value) for name, value in training.model.state_dict().items())


def test_average_follows_its_formula(tmp_path):
    training = make_training(tmp_path, ema=0.5, epochs=1)
    name, parameter = next(iter(training.model.named_parameters()))
    expected, step_values = parameter.detach().clone(), []

    def after_step(progress, loss, lr):
        step_values.append(parameter.detach().clone())

    training.watchers[0].stepped = after_step
    training.run()
    for step, value in enumerate(step_values):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert torch.allclose(training.average.module.state_dict()[name], expected, atol=1e-6)


def test_early_stopping_counts_epochs_without_a_better_one(tmp_path):
    training = make_training(tmp_path, epochs=50, early_stopping=2, lr=1e-12, model={"norm": "layer"})
    progress = training.run()
    assert len(progress.history) == 3 and progress.stale_epochs == 2


def test_a_request_to_stop_saves_between_two_steps(tmp_path):
    stop = StopRequest()
    watcher = KillAt()
    training = make_training(tmp_path / "run", watcher=watcher, stop=stop, save_seconds=1000)
    inner = watcher.stepped

    def stepped(progress, loss, lr):
        inner(progress, loss, lr)
        if len(watcher.losses) == 6:
            stop.number = 2

    watcher.stepped = stepped
    with pytest.raises(Interrupted) as interruption:
        training.run()
    assert interruption.value.code == 130
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / "last").state
    assert (state["epoch"], state["step"]) in {(1, 1), (1, 2)}  # 5 steps an epoch
    make_training(tmp_path / "whole").run()
    resumed = make_training(tmp_path / "run")
    resumed.resume()
    resumed.run()
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def assert_finite(folder):
    saved = read_checkpoint(folder / "checkpoints" / "last")
    assert all(torch.isfinite(value).all() for value in (*saved.model.values(), *saved.trainer.values()))


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_that_are_no_numbers_are_named(tmp_path, workers):
    images = toy()
    images.images = images.images.astype(np.float32) / 255
    images.images[[11, 23]] = np.nan
    training = make_training(tmp_path, images=images, workers=workers, augment=AugmentOptions(), batch_size=4)
    with pytest.raises(TrainingError, match=r"epoch 1, step \d+: the pixels of toy/train/(11|23).* keeps the last good state"):
        training.run()
    assert_finite(tmp_path)


def test_a_loss_that_is_no_number_names_the_images_and_keeps_the_last_good_state(tmp_path):
    training = make_training(tmp_path, lr=1e30, schedule="constant", warmup=0.0, clip=0.0)
    with pytest.raises(TrainingError, match=r"epoch 1, step \d+: the (loss|gradient) of .*toy/train/\d+.* lower --train.lr"):
        training.run()
    assert_finite(tmp_path)


def test_a_gradient_that_is_no_number_does_not_reach_the_weights(tmp_path):
    training = make_training(tmp_path, clip=0.0)
    parameter = next(training.model.parameters())
    parameter.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingError, match="the gradient of a batch with toy/train/"):
        training.run()
    assert all(torch.isfinite(p).all() for p in training.model.parameters())


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_two_bad_steps_are_left_out_and_the_third_ends_the_run(tmp_path, ema):
    """A bad step changes nothing: not the weights, not the statistics of the norms, not the optimiser, not the average."""

    def poison(path, steps):
        training = make_training(path, ema=ema, clip=0.0, epochs=1)
        step, count = training._step, iter(range(100))

        def poisoned(parts):
            training.model.bad = next(count) in steps
            return step(parts)

        training._step = poisoned
        training.model.register_forward_hook(lambda module, inputs, out: out * math.nan if module.bad else out)
        return training

    training = poison(tmp_path / "two", (1, 2))
    states = []
    training.watchers[0].skipped = lambda bad: states.append((bad, {**optimizer_state(training)}))
    training.run()
    assert len(states) == 2 and "the step is left out" in states[0][0][0][1]
    assert all(torch.equal(value, states[1][1][name]) for name, value in states[0][1].items())
    noted = json.loads((tmp_path / "two" / "bad_batches.json").read_text())
    assert [(row["epoch"], row["step"]) for row in noted] == [(1, 2), (1, 3)] and len(noted[0]["batch"]) == 8
    assert training.progress.bad_steps == 0 and training.progress.history[0]["train_loss"] > 0

    training = poison(tmp_path / "three", (1, 2, 3))
    with pytest.raises(TrainingError, match="epoch 1, step 4: the loss of toy.*in a row that are bad: 3.*bad_batches.json"):
        training.run()
    assert_finite(tmp_path / "three")
    assert read_checkpoint(tmp_path / "three" / "checkpoints" / "last").state["step"] == 1


def optimizer_state(training):
    tensors = {**training.model.state_dict(), **optimizer_tensors(training.optimizer, training.model)}
    if training.average:
        tensors |= {f"average/{name}": value for name, value in training.average.module.state_dict().items()}
    return {name: value.clone() for name, value in tensors.items()}


def test_clipping_limits_the_gradient(tmp_path):
    training = make_training(tmp_path, clip=1e-3, epochs=1)
    training.run()
    norm = torch.cat([p.grad.flatten() for p in training.model.parameters()]).norm()
    assert norm <= 1.001e-3


def test_skipped_images_are_told(tmp_path):
    images = toy()
    images.read_many = None
    read = images.read

    def sometimes(index, crop=None):
        if index == 5:
            raise BadImage("toy/train/5: truncated; replace it")
        return read(index, crop)

    images.read = sometimes
    watcher = KillAt()
    make_training(tmp_path, images=images, on_bad="skip", epochs=2, watcher=watcher, augment=AugmentOptions()).run()
    assert watcher.bad == [("toy/train/5", "toy/train/5: truncated; replace it")] * 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_training(tmp_path, epochs=1).run()
    other = make_training(tmp_path, epochs=2, model={"dims": 8})
    with pytest.raises(TrainingError, match="of another model or version"):
        other.resume()


def test_models_without_gradient_checkpointing_say_so(tmp_path):
    from revit.training.loop import _enable_grad_checkpointing

    with pytest.raises(TrainingError, match="Linear has no gradient checkpointing"):
        _enable_grad_checkpointing(torch.nn.Linear(2, 2))


def test_a_run_that_died_in_its_first_save_begins_again(tmp_path):
    partial = tmp_path / "checkpoints" / ".last.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    training = make_training(tmp_path, epochs=1)
    training.resume()
    training.run()
    assert len(training.progress.history) == 1


def rows(*accuracies):
    return [{"epoch": i + 1, "val_accuracy": accuracy} for i, accuracy in enumerate(accuracies)]


def test_validation_chooses_the_latest_epoch_that_it_cannot_tell_from_the_highest():
    accuracies = rows(0.80, 0.956, 0.94, 0.949, 0.93)
    few = Progress(epoch=5, val_images=500, history=accuracies)  # standard error 0.0092: 0.949 is as good as 0.956
    assert few.best["epoch"] == 4 and few.stale_epochs == 3
    many = Progress(epoch=5, val_images=50_000, history=accuracies)  # 0.0009
    assert many.best["epoch"] == 2
    assert Progress(epoch=2, val_images=10, history=rows(1.0, 1.0)).best["epoch"] == 2


def test_a_folder_that_vanishes_between_the_files_of_a_save(tmp_path, monkeypatch):
    """The checkpoint is written, then the folder goes, then results.csv has no place: all is saved again where it was."""
    training = make_training(tmp_path / "run", epochs=1)
    training.folder.start(Recipe(), resume=False)
    write, gone = training.folder.write_results, []

    def after_it_went(rows):
        if rows and not gone:
            gone.append((tmp_path / "run").rename(tmp_path / "moved"))
        write(rows)

    monkeypatch.setattr(training.folder, "write_results", after_it_went)
    with training.folder, pytest.raises(RunError, match="run: vanished while the run was using it"):
        training.run()
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").state["epoch"] == 1
    assert (tmp_path / "run" / "results.csv").exists()
