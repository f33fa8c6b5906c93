"""Schedules against torch's own, and at their ends."""

from itertools import pairwise

import pytest
import torch

from revit.training.recipe import TrainOptions
from revit.training.schedule import learning_rate, momentum


@pytest.mark.parametrize(("steps", "warmup"), [(50, 0.1), (300, 0.25), (7, 0.3)])
def test_onecycle_is_that_of_torch(steps, warmup):
    options = TrainOptions(schedule="onecycle", lr=0.005, warmup=warmup, lr_start=0.1, lr_end=0.001)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.005, total_steps=steps, pct_start=warmup, div_factor=10, final_div_factor=100
    )
    for step in range(steps):
        group = optimizer.param_groups[0]
        assert learning_rate(options, step, steps) == pytest.approx(group["lr"], rel=1e-9)
        assert momentum(options, step, steps) == pytest.approx(group["betas"][0], rel=1e-9)
        optimizer.step()
        if step < steps - 1:
            reference.step()


def test_cosine_rises_in_a_line_and_falls_to_its_end():
    options = TrainOptions(schedule="cosine", lr=1.0, warmup=0.1, lr_start=0.03, lr_end=0.0)
    rates = [learning_rate(options, step, 101) for step in range(101)]
    assert rates[0] == pytest.approx(0.03) and max(rates) == pytest.approx(1.0, rel=0.01) and rates[-1] == pytest.approx(0.0)
    rises = [b - a for a, b in pairwise(rates[:10])]
    assert max(rises) == pytest.approx(min(rises))
    assert all(b < a for a, b in pairwise(rates[11:]))
    assert momentum(options, 5, 101) == 0.9


def test_constant_without_warmup():
    options = TrainOptions(schedule="constant", lr=0.2, warmup=0.0)
    assert {learning_rate(options, step, 10) for step in range(10)} == {0.2}


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_schedule(schedule, steps):
    options = TrainOptions(schedule=schedule, lr=1.0)
    assert all(0 <= learning_rate(options, step, steps) <= 1 for step in range(steps))
