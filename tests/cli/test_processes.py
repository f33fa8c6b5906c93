"""Real processes: killed, interrupted, and several at once."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from revit.training.checkpoint import read_checkpoint, read_latest
from tests.cli.conftest import TINY

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(npz, *more, module=("-m", "revit")):
    return [sys.executable, *module, *npz, *more]


def run(words):
    finished = subprocess.run(words, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def weights(path):
    checkpoint = read_checkpoint(Path(path) / "checkpoints" / "last")
    return {**checkpoint.model, **checkpoint.trainer}


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_runs_end_with_the_same_bits(npz, workers):
    """SIGKILL at random moments after the first step; the number of kills here is small, `make test-slow` has ten."""
    kill_and_resume(npz, workers, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ten_kills(npz, workers):
    kill_and_resume(npz, workers, kills=10)


def kill_and_resume(npz, workers, kills):
    options = ["--train.ema", "0.9", "--train.epochs", "30", "--data.workers", str(workers), "--train.save_seconds", "0.05"]
    run(command(npz, "--out", "whole", *options))
    generator, survived = random.Random(workers), 0
    for attempt in range(kills):
        process = subprocess.Popen(
            command(npz, "--out", "broken", *options, *(["--resume"] if attempt else [])), env=ONE_THREAD,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        before = _progress("broken")
        while process.poll() is None and _progress("broken") == before:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        survived += process.returncode == 0
        assert b"Traceback" not in errors and b"error" not in errors, errors.decode()
    assert survived == 0, "the runs were over before they were killed"
    run(command(npz, "--out", "broken", *options, "--resume"))
    whole, broken = weights("whole"), weights("broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def _progress(path):
    """What `last` says, or nothing yet."""
    try:
        return (Path(path) / "checkpoints" / "last" / "trainer.json").read_bytes()
    except OSError:
        return b""


def test_ctrl_c_saves_and_exits_130(npz):
    process = subprocess.Popen(
        command(npz, "--out", "run", "--train.epochs", "5000", "--data.workers", "2", "--train.save_seconds", "1000"),
        env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not Path("run/results.csv").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - begin < 10
    assert "revit train run --resume" in out and "Traceback" not in errors
    state = read_checkpoint(Path("run/checkpoints/last")).state
    assert state["epoch"] >= 1


EXACT = ["--train.precision", "float64", "--model.norm", "layer", "--train.accumulate", "2", "--augment.mixup", "0.3"]


def on_two_processes():
    port = str(random.randint(20000, 40000))
    return "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, "-m", "revit"


def test_two_processes_are_one_process(npz):
    """Same global batch, layer norm, float64: the same loss curve; no test image is counted twice."""
    options = [*EXACT, "--train.epochs", "3", "--train.ema", "0.9"]
    run(command(npz, "--out", "one", *options))
    run(command(npz, "--out", "two", *options, module=on_two_processes()))
    same_runs(epochs=3)


def test_two_sharded_processes_are_one_process(npz):
    """FSDP, stopped and resumed: the same loss curve, and checkpoints that are whole."""
    options = [*EXACT, "--train.epochs", "12"]
    run(command(npz, "--out", "one", *options))
    sharded = [*options, "--train.sharding", "fsdp", "--train.save_seconds", "0.05"]
    process = subprocess.Popen(
        command(npz, "--out", "two", *sharded, module=on_two_processes()), env=ONE_THREAD, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and not Path("two/results.csv").exists():
        time.sleep(0.01)
    process.terminate()  # torchrun passes it on; all processes stop after the same step
    process.wait(timeout=60)
    assert 1 <= read_latest(Path("two/checkpoints/last")).state["epoch"] < 12
    run(command(npz, "--out", "two", *sharded, "--resume", module=on_two_processes()))
    same_runs(epochs=12)


def same_runs(epochs):
    one, two = (list(csv.DictReader(Path(f"{name}/results.csv").read_text().splitlines())) for name in ("one", "two"))
    assert len(one) == len(two) == epochs
    for a, b in zip(one, two, strict=True):
        for column in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"):
            assert float(a[column]) == pytest.approx(float(b[column]), abs=1e-8), column
    results = [json.loads(Path(f"{name}/test.json").read_text()) for name in ("one", "two")]
    assert results[0]["images"] == results[1]["images"] == 21
    assert results[0]["confusion"] == results[1]["confusion"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-8)
    assert results[1]["processes"] == 2
    first, second = weights("one"), weights("two")
    assert first.keys() == second.keys()
    assert [name for name in first if not np.allclose(first[name], second[name], atol=1e-8)] == []


def test_bad_input_on_two_processes_ends_both(npz):
    words = [sys.executable, *on_two_processes(), "train", "folder", "--data-root", "nowhere", *TINY]
    finished = subprocess.run(words, env=ONE_THREAD, capture_output=True, text=True, timeout=120)
    assert finished.returncode != 0
    assert "error: nowhere: no such folder" in finished.stderr
