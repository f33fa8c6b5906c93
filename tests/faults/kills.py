"""1. Kill and resume: a run that dies loses no completed save, and ends with the same bits as one that does not die."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from revit.training.checkpoint import read_checkpoint, read_latest
from revit.training.loop import Training
from revit.training.recipe import Recipe, TrainOptions
from revit.training.run_folder import RunError, RunFolder
from tests.faults import victims
from tests.faults.cases import RUNS, assert_same_run, number_of, write
from tests.faults.tally import Tally, refused
from tests.training.runs import KillAt, Killed, make_training


def kills_while_saving(folder: Path, count: int, seed: int) -> Tally:
    """SIGKILL at random moments of saving: `last` is whole, and no save that was completed is lost."""
    tally, generator, last = Tally(), random.Random(seed), folder / "last"
    begin = time.perf_counter()
    write(last, 0)
    duration, done = time.perf_counter() - begin, 0
    for kill in range(count):
        with tally.trial(f"kill {kill}"):
            receive, send = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    victims.save_for_ever(str(last), done + 1, send)
                finally:
                    os._exit(1)
            os.close(send)
            time.sleep(generator.uniform(0, 4) * duration)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told = os.read(receive, 1 << 16)
            os.close(receive)
            completed = int.from_bytes(told[-8:], "little") if told else done
            number = number_of(read_checkpoint(last))
            assert number in (completed, completed + 1), f"save {number} is there, {completed} was completed"
            done = number
    return tally


def resumes_at_random_steps(folder: Path, count: int, seed: int) -> Tally:
    """Ended after a random step, resumed: weights, optimiser, schedule, history and the state of the generator are the same."""
    tally, generator = Tally(), random.Random(seed)
    states: dict[int, tuple[torch.Tensor, float]] = {}
    for trial in range(count):
        which = trial % len(RUNS)
        whole, broken = folder / f"whole{which}", folder / f"broken{trial}"
        with tally.trial(f"{RUNS[which] or 'default'}, trial {trial}"):
            if which not in states:
                states[which] = _finish(make_training(whole, **RUNS[which]))
            at = generator.randint(1, 14)
            training = make_training(
                broken, watcher=KillAt(at), **{**RUNS[which], "save_seconds": generator.choice([0.0, 1000.0])}
            )
            try:
                training.run()
            except Killed:
                AcceleratorState._reset_state(reset_partial_state=True)
            torch.manual_seed(generator.randint(0, 10**6))  # whatever the new process begins with
            resumed = make_training(broken, **RUNS[which])
            resumed.resume()
            random_state, rate = _finish(resumed)
            assert torch.equal(random_state, states[which][0]) and rate == states[which][1], "another random state or rate"
            assert_same_run(whole, broken)
    return tally


def _finish(training: Training) -> tuple[torch.Tensor, float]:
    training.run()
    AcceleratorState._reset_state(reset_partial_state=True)
    return torch.get_rng_state(), training.optimizer.param_groups[0]["lr"]


def killed_trainings(folder: Path, count: int, seed: int) -> Tally:
    """SIGKILL of training processes at random moments, resumed by new ones until they are through: the same bits."""
    tally, generator = Tally(), random.Random(seed)
    for trial in range(count):
        which = trial % len(RUNS)
        case = {**RUNS[which], "epochs": 8}
        whole, broken = folder / f"process{which}", folder / f"killed{trial}"
        with tally.trial(f"{RUNS[which] or 'default'}, trial {trial}"):
            if not whole.exists():
                process = victims.start(victims.train, str(whole), case, False)
                process.join()
                assert process.exitcode == 0
            process = victims.start(victims.train, str(broken), case, False)
            victims.wait_for((broken / "checkpoints" / "last").exists, process)
            time.sleep(generator.uniform(0, 0.4))
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), "it failed before it was killed"
            read_latest(broken / "checkpoints" / "last")
            process = victims.start(victims.train, str(broken), case, True)
            process.join()
            assert process.exitcode == 0, "it cannot be resumed"
            assert_same_run(whole, broken)
    return tally


def finished_and_changed(folder: Path, count: int, seed: int) -> Tally:
    """A finished run trains no more; another configuration or number of processes is refused unless it is allowed by name."""
    tally = Tally()
    with tally.trial("a finished run"):
        make_training(folder / "run", epochs=1).run()
        watcher = KillAt()
        again = make_training(folder / "run", epochs=1, watcher=watcher)
        again.resume()
        again.run()
        assert not watcher.losses and len(again.progress.history) == 1
        AcceleratorState._reset_state(reset_partial_state=True)

    def begin(resume: bool, *may_change: str, **options: object) -> None:
        with RunFolder(folder / "changed") as run:
            run.start(Recipe(train=TrainOptions(**options)), resume=resume, may_change=frozenset(may_change))  # type: ignore[arg-type]

    begin(False)
    changes = [("lr", 0.5), ("seed", 3), ("batch_size", 32), ("schedule", "cosine"), ("epochs", 7)]
    for option, value in changes:
        name = f"train.{option}"
        with tally.trial(f"{name} changed"), refused(RunError, name, f"now {value}", f"--allow-change {name}"):
            begin(True, **{option: value})
        with tally.trial(f"{name} changed by name"):
            begin(True, name, **{option: value})
            begin(True, name)  # back again
    os.environ["WORLD_SIZE"] = "2"
    try:
        with tally.trial("another number of processes"), refused(RunError, "processes (1, now 2)", "--allow-change processes"):
            begin(True)
        with tally.trial("another number of processes by name"):
            begin(True, "processes")
    finally:
        del os.environ["WORLD_SIZE"]
    return tally
