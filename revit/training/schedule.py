"""Learning rate and momentum as functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from revit.training.recipe import TrainOptions

BETA1, BETA1_LOW, BETA1_HIGH = 0.9, 0.85, 0.95


def learning_rate(options: TrainOptions, step: int, steps: int) -> float:
    """The learning rate of step `step` of `steps`."""
    low, top, end = options.lr * options.lr_start, options.lr, options.lr * options.lr_end
    if options.schedule == "constant":
        rising, share = _phase(options, step, steps)
        return low + share * (top - low) if rising else top
    rising, share = _phase(options, step, steps)
    if rising:
        return _cosine(low, top, share) if options.schedule == "onecycle" else low + share * (top - low)
    return _cosine(top, end, share)


def momentum(options: TrainOptions, step: int, steps: int) -> float:
    """The first beta of AdamW: low where the learning rate of `onecycle` is high (Smith and Topin 2018), else constant."""
    if options.schedule != "onecycle":
        return BETA1
    rising, share = _phase(options, step, steps)
    return _cosine(BETA1_HIGH, BETA1_LOW, share) if rising else _cosine(BETA1_LOW, BETA1_HIGH, share)


def _phase(options: TrainOptions, step: int, steps: int) -> tuple[bool, float]:
    """Whether the learning rate still rises, and how much of that phase is over."""
    peak = options.warmup * steps - 1
    if step <= peak and peak > 0:
        return True, step / peak
    start = max(peak, 0)
    return False, min(1.0, (step - start) / max(1e-12, steps - 1 - start)) if steps > 1 else 0.0


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
