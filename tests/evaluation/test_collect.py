"""Answers for a whole split: every image once, in its order, the model as it was."""

import numpy as np
import pytest
import torch

from revit.data import ArrayImages, DataSpec
from revit.data.loader import EvalLoader, Reading, Share
from revit.evaluation.collect import collect_logits, join_outputs

SPEC = DataSpec("toy", 1, (4, 4), ("a", "b"), (0.0,), (1.0,), "made here")
CPU = torch.device("cpu")


def toy(count=11):
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (count, 1, 4, 4), dtype=np.uint8)
    return ArrayImages(pixels, np.arange(count) % 2, "toy")


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2), torch.nn.Dropout(0.5)).train()


def test_logits_are_those_of_the_images_in_eval_mode(model):
    outputs = collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4), CPU)
    x = torch.from_numpy(toy().images).float() / 255
    assert torch.allclose(outputs.logits, model.eval()(x), atol=1e-6)
    assert np.array_equal(outputs.samples, np.arange(11)) and torch.equal(outputs.labels, torch.arange(11) % 2)


def test_the_mode_of_the_model_is_restored(model):
    collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4), CPU)
    assert model.training


def test_a_check_may_stop_it(model):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4), CPU, check=stop)
    assert model.training


@pytest.mark.parametrize("world", [2, 3, 13])
def test_processes_together_have_each_image_once(model, world):
    parts = [
        collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4, reading=Reading(Share(rank, world))), CPU)
        for rank in range(world)
    ]
    whole = collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4), CPU)
    joined = join_outputs(parts[::-1])
    assert np.array_equal(joined.samples, whole.samples) and torch.equal(joined.labels, whole.labels)
    assert torch.allclose(joined.logits, whole.logits, atol=1e-6)


def test_an_image_of_two_processes_is_refused(model):
    outputs = collect_logits(model, EvalLoader(toy(), SPEC, batch_size=4), CPU)
    with pytest.raises(ValueError, match="evaluated by two processes"):
        join_outputs([outputs, outputs])
