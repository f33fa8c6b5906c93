"""`revit benchmark plan`: what it says, and how it refuses."""

import json
import re
from pathlib import Path

import pytest

from revit.cli import main

SMALL = [
    "benchmark", "plan", "demo", "--model.name", "revit_tiny", "--size", "28", "--channels", "1", "--classes", "10",
    "--images", "10000", "--train.batch_size", "64",
]  # fmt: skip


def test_a_plan_adds_up_and_is_checked_against_a_real_step(capsys):
    assert main([*SMALL, "--gpus", "2", "--check", "32", "--out", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "it fits as it is" in printed and "2 GPUs of 24 GB, ddp, float32, 64 images a step, 32 at a time" in printed
    values = json.loads(Path("plan.json").read_text())
    for plan in values["plans"]:
        assert plan["total"] == pytest.approx(sum(plan["memory"].values())) and plan["fits"] and plan["images"] == 32
    for check in values["checks"]:
        assert check["predicted_bytes"] == pytest.approx(check["measured_bytes"], rel=0.2)


def test_too_small_a_gpu_needs_parts(capsys):
    assert main([*SMALL, "--gpus", "1", "--gpu-memory", "60MB", "--train.sharding", "fsdp"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"it fits with --train\.(accumulate \d+|grad_checkpointing true)", printed)
    assert main([*SMALL, "--gpu-memory", "100kB"]) == 0
    assert "it does not fit, in however many parts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--gpu-memory", "24XB"], "--gpu-memory: '24XB' is no amount of memory"),
        (["--gpu-tflops", "0"], "--gpu-tflops must be above 0"),
        (["--utilisation", "1.5"], "--utilisation must be above 0 and at most 1, got 1.5"),
        (["--model.name", "resnet_of_mine"], "resnet_of_mine"),
        (["--batch-size", "3"], "unknown option --batch-size"),
        (["--gpus", "65"], "a batch of 64 cannot be shared by 65 GPUs"),
        (["--check", "1"], "--check needs at least 2 images"),
        (["--train.sharding", "zero"], "train.sharding must be ddp, fsdp, got 'zero'"),
        (["--train.precision", "float64"], "plan with float32 or bf16"),
    ],
)
def test_wrong_uses_are_one_line(words, message, fails):
    assert message in fails(*SMALL, *words)
