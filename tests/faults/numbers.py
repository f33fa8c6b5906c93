"""4. Numbers: odd inputs give the answer of the plain one or a named error; losses that are no numbers do no harm."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from revit import create_model
from revit.data.augment import AugmentOptions
from revit.training.checkpoint import read_checkpoint
from revit.training.loop import Training, TrainingError
from revit.training.optimizer import optimizer_tensors
from tests.faults.tally import Tally, refused
from tests.training.runs import make_training, toy

MODELS: dict[str, dict[str, Any]] = {
    "revit_tiny": {"dims": 4, "depths": 1, "num_heads": 1, "window_size": 4},
    "revit_hier_tiny": {"dims": [4, 4, 8], "depths": [1, 1, 1], "num_heads": [1, 1, 2]},
}


def inputs(folder: Path, count: int, seed: int) -> Tally:
    """Batches of 0 and 1, other layouts, gradients, uint8, NaN and Inf, other sizes, below the window, float16 overflow."""
    tally = Tally()
    for name, options in MODELS.items():
        torch.manual_seed(seed)
        model = create_model(name, group="p4", in_chans=3, num_classes=4, **options).eval()
        x = torch.randn(2, 3, 32, 32)
        plain = model(x).detach()

        def same(what: str, y: Tensor, model: torch.nn.Module = model, plain: Tensor = plain, name: str = name) -> None:
            with tally.trial(f"{name}, {what}"):
                assert torch.allclose(model(y), plain[: len(y)], atol=1e-5), "another answer"

        same("an empty batch", x[:0])
        same("one image", x[:1])
        same("channels_last", x.contiguous(memory_format=torch.channels_last))
        same("not contiguous", x.transpose(2, 3).contiguous().transpose(2, 3))
        same("every second of a larger tensor", torch.stack([x, x], dim=-1).flatten(-2)[..., ::2])
        same("expanded", x[:1].expand(1, 3, 32, 32))
        wanted = x.clone().requires_grad_()
        same("requires_grad", wanted)
        with tally.trial(f"{name}, the gradient of the images"):
            model(wanted).sum().backward()
            assert wanted.grad is not None and torch.isfinite(wanted.grad).all()
        for value in (math.nan, math.inf, -math.inf):
            bad = x.clone()
            bad[1, 0, 3, 3] = value
            with tally.trial(f"{name}, a pixel is {value}"), refused(ValueError, "batch positions [1]"):
                model(bad)
        for kind in (torch.uint8, torch.int64, torch.bool):
            with tally.trial(f"{name}, {kind}"), refused(ValueError, str(kind), "x.float() / 255"):
                model(x.to(kind))
        for size in ((24, 40), (64, 16), (16, 32)):
            with tally.trial(f"{name}, {size[0]} x {size[1]}"):
                assert torch.isfinite(model(torch.randn(1, 3, *size))).all()
        for size in ((0, 0), (1, 1), (1, 40)):
            with tally.trial(f"{name}, {size[0]} x {size[1]}"), refused(ValueError, f"{size[0]} x {size[1]}"):
                model(torch.randn(1, 3, *size))
        for wrong in (x[0], x[:, :1], x[None]):
            with tally.trial(f"{name}, shape {list(wrong.shape)}"), refused(ValueError):
                model(wrong)
        with tally.trial(f"{name}, below the window"):
            assert torch.isfinite(model(torch.randn(1, 3, 8, 8))).all()
        with tally.trial(f"{name}, float16 that overflows"), refused(ValueError, "batch positions"):
            model.half()((1e6 * x).half())
    return tally


def bad_losses(folder: Path, count: int, seed: int) -> Tally:
    """A loss becomes NaN or Inf at random steps: one or two are left out, three end the run; nothing is poisoned."""
    tally, generator = Tally(), random.Random(seed)
    for trial in range(count):
        first, length = generator.randint(0, 6), 1 + trial % 3
        value, ema = generator.choice([math.nan, math.inf]), generator.choice([0.0, 0.9])
        run = folder / f"run{trial}"
        with tally.trial(f"{length} bad steps from {first} on, {value}, ema {ema}"):
            training = make_training(run, ema=ema, clip=0.0, epochs=2)
            states = _poison(training, range(first, first + length), value)
            if length < 3:
                training.run()
                assert len(training.progress.history) == 2
            else:
                with refused(TrainingError, "is not a finite number", "keeps the last good state", "bad_batches.json"):
                    training.run()
                state = read_checkpoint(run / "checkpoints" / "last").state
                assert state["bad_steps"] == 0 or state["step"] == 0, "saved between bad steps"  # but for the end of an epoch
            for before, after in states:
                assert all(torch.equal(value, after[name]) for name, value in before.items()), "a bad step left a trace"
            saved = read_checkpoint(run / "checkpoints" / "last")
            assert all(torch.isfinite(tensor).all() for tensor in (*saved.model.values(), *saved.trainer.values()))
            noted = json.loads((run / "bad_batches.json").read_text())
            assert len(noted) == length and all(len(row["batch"]) == 8 for row in noted)
        AcceleratorState._reset_state(reset_partial_state=True)
    with tally.trial("pixels that are NaN"), refused(TrainingError, "the pixels of toy/train/11"):
        images = toy()
        images.images = images.images.astype(np.float32) / 255
        images.images[11] = np.nan
        make_training(folder / "pixels", images=images, augment=AugmentOptions()).run()
    with tally.trial("their names are written"):
        assert "toy/train/11" in json.loads((folder / "pixels" / "bad_batches.json").read_text())[0]["not finite"]
    AcceleratorState._reset_state(reset_partial_state=True)
    return tally


def _poison(training: Training, steps: range, value: float) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Makes the loss of these steps a number that is none; returns the states before and after each that was left out."""
    step, count, states = training._step, iter(range(10**6)), []
    poisoned = False

    def hooked(parts: Any) -> Any:
        nonlocal poisoned
        poisoned = next(count) in steps
        before = _state(training)
        result = step(parts)
        if poisoned:
            states.append((before, _state(training)))
        poisoned = False  # validation is not touched
        return result

    training.model.register_forward_hook(lambda module, inputs, output: output * value if poisoned else output)
    training._step = hooked  # type: ignore[method-assign]
    return states


def _state(training: Training) -> dict[str, Tensor]:
    tensors = {**training.model.state_dict(), **optimizer_tensors(training.optimizer, training.model)}
    if training.average:
        tensors |= {f"average/{name}": value for name, value in training.average.module.state_dict().items()}
    return {name: value.clone() for name, value in tensors.items()}
