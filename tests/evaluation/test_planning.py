"""What a step of any batch takes: against hooks of autograd, against steps that are really computed, and by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit import create_model
from revit.evaluation.planning import LiveTensors, StepCost, step_cost
from revit.nn import GroupMLP


def make(checkpointing=False):
    torch.manual_seed(0)
    model = create_model("revit_tiny", group="p4", in_chans=1, num_classes=3, dims=8, depths=2, num_heads=2, norm="layer")
    model.set_grad_checkpointing(checkpointing)
    return model.train()


def saved_bytes(model, batch):
    """Bytes of the tensors that autograd saves in a forward pass, each storage once, without weights and images.

    Its hooks do not see what the part of an MLP that is computed again holds on to: the bank of the second layer.
    """
    images = torch.zeros(batch, 1, 28, 28)
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), images)}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(images), torch.zeros(batch, dtype=torch.long))
    banks = [mlp.fc2.filters() for mlp in model.modules() if isinstance(mlp, GroupMLP)]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*kept, *banks))


@pytest.mark.parametrize("batch", [2, 7])
def test_activations_are_what_autograd_saves(batch):
    model = make()
    assert step_cost(model, (28, 28), 1).kept(batch) == pytest.approx(saved_bytes(model, batch), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_zeros_instead_of_products_change_nothing_and_batches_are_foreseen(checkpointing):
    """The peak of a step of 9 images that is really computed, from steps of 2 and 3 images that are not."""
    model = make(checkpointing)
    cost = step_cost(model, (28, 28), 1)
    images, labels = torch.randn(9, 1, 28, 28), torch.zeros(9, dtype=torch.long)
    with LiveTensors([*model.parameters(), *model.buffers(), images, labels], compute=True) as live:
        F.cross_entropy(model(images), labels).backward()
    assert cost.peak(9) == pytest.approx(max(live.history), rel=0.01)
    assert cost.macs[0] + 9 * cost.macs[1] == pytest.approx(live.macs)


def test_checkpointing_saves_memory_and_costs_a_forward_pass():
    plain, frugal = (step_cost(make(checkpointing), (28, 28), 1) for checkpointing in (False, True))
    assert frugal.kept(64) < plain.kept(64) / 3 and frugal.peak(64) < 0.8 * plain.peak(64)
    assert 1.1 < frugal.macs[1] / plain.macs[1] < 1.4


def test_by_hand():
    """Linear 5 -> 7 and 7 -> 3: products, and activations, written down."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    cost = step_cost(model, (1, 5), 1)
    assert cost.macs[1] == pytest.approx(5 * 7 + 5 * 7 + 3 * (7 * 3) - 0) and cost.macs[0] == 0  # no gradient for the images
    assert cost.activations[1] == pytest.approx(4 * (7 + 3), abs=16)  # after ReLU, and log-softmax
    half = step_cost(model, (1, 5), 1, bf16=True)
    assert half.activations[1] < cost.activations[1] * 1.5 and half.macs == cost.macs


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3)).eval()
    model(torch.zeros(2, 1, 6, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step_cost(model, (6, 6), 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())


def test_the_largest_batch_is_the_largest():
    cost = StepCost(np.array([100.0, 10.0, 50.0]), np.array([1.0, 4.0, 0.0]), (0.0, 4.0), (0.0, 1.0))
    assert [cost.peak(batch) for batch in (1, 30, 31)] == [101, 130, 134]
    assert cost.largest_batch(133.9) == 30 and cost.largest_batch(134) == 31 and cost.largest_batch(99) == 0
