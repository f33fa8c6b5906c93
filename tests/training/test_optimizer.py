"""Muon: against AdamW of torch, against the singular value decomposition, and who gets which."""

import pytest
import torch
from torch import nn

from revit.models import create_model
from revit.nn import GroupConv, GroupLinear
from revit.training.optimizer import ADAM_STEP, Muon, make_optimizer, orthogonalise
from revit.training.recipe import RecipeError, TrainOptions


def test_vectors_and_the_classifier_are_trained_by_adamw():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
    muon = Muon([{"params": [ours], "weight_decay": 0.1}], lr=0.01)
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(5):
        grad = torch.randn(2, 3)
        for parameter, optimizer in ((ours, muon), (theirs, adamw)):
            parameter.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (12, 12), (1, 7)])
def test_steps_keep_the_singular_vectors_and_even_out_the_values(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = torch.linalg.multi_dot([left.T, orthogonalise(matrix), right.T])
    torch.testing.assert_close(found, torch.diag(found.diag()), rtol=0, atol=1e-9)
    assert found.diag().min() > 0.5 and found.diag().max() < 1.3
    assert values.max() / values.min() >= found.diag().max() / found.diag().min()


def test_a_step_is_as_large_as_one_of_adamw_and_opposes_the_gradient():
    parameter = nn.Parameter(torch.zeros(8, 4, 4, 3, 3))
    muon = Muon([{"params": [parameter], "orthogonal": True}], lr=0.5)
    parameter.grad = torch.randn(parameter.shape)
    muon.step()
    assert (parameter * parameter.grad).sum() < 0
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.5 * ADAM_STEP, rel=0.3)
    parameter.grad = torch.zeros_like(parameter)  # nothing is made of no gradient and a momentum that fades
    muon.step()
    assert torch.isfinite(parameter).all()


def test_filters_and_hidden_matrices_take_orthogonal_steps():
    model = create_model("revit_tiny", group="p4", in_chans=1)
    groups = make_optimizer(model, TrainOptions(optimizer="muon", weight_decay=0.3)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    orthogonal = [{names[id(p)] for p in group["params"]} for group in groups if group["orthogonal"]]
    others = {names[id(p)] for group in groups if not group["orthogonal"] for p in group["params"]}
    assert len(orthogonal) == 1 and orthogonal[0] | others == set(names.values())
    assert all(dict(model.named_parameters())[name].ndim > 1 for name in orthogonal[0])
    assert {name for name in others if dict(model.named_parameters())[name].ndim > 1} == {"head.fc.weight"}
    assert {group["weight_decay"] for group in groups if group["orthogonal"]} == {0.3}


def step_of(layer, optimizer, lr=0.5):
    """The weight after a step from zero, for gradients that are the same at each call."""
    torch.manual_seed(1)
    layer.weight.data.zero_()
    layer.weight.grad = torch.randn_like(layer.weight)
    make_optimizer(layer, TrainOptions(optimizer=optimizer, lr=lr)).step()
    return layer.weight.detach().clone()


@pytest.mark.parametrize("group", ["z2m", "p4", "p4m", "p6", "p8m"])
@pytest.mark.parametrize("fields", [(6, 4), (4, 6)])
def test_steps_of_group_muon_are_orthogonal_as_maps_on_the_group(group, fields):
    layer = GroupLinear(group, *fields, bias=False).double()
    step = step_of(layer, "group_muon")
    bank = layer.filters().detach().flatten(1)  # [O*G, I*G]
    values = torch.linalg.svdvals(bank) / (0.5 * ADAM_STEP * (max(fields) * layer.group.order) ** 0.5)
    assert values.min() > 0.5 and values.max() < 1.3
    assert step.square().mean().sqrt().item() == pytest.approx(0.5 * ADAM_STEP, rel=0.3)
    assert (step * layer.weight.grad).sum() < 0
    step_of(layer, "muon")
    spread = torch.linalg.svdvals(layer.filters().detach().flatten(1))
    assert spread.max() / spread.min() > values.max() / values.min()  # what is orthogonal as a matrix is not as a map


def test_group_muon_is_muon_where_there_is_no_group_to_speak_of():
    plain = GroupConv("z2", 4, 6, kernel_size=3).double()
    torch.testing.assert_close(step_of(plain, "group_muon"), step_of(plain, "muon"), rtol=1e-9, atol=1e-12)
    single = GroupConv("p4", 4, 4, kernel_size=3, groups=4).double()  # each field alone: no map between fields
    assert torch.equal(step_of(single, "group_muon"), step_of(single, "muon"))
    gaussians = GroupConv("p8", 4, 6, kernel_size=3, filters="rbf").double()  # do not turn into each other
    assert torch.equal(step_of(gaussians, "group_muon"), step_of(gaussians, "muon"))


def test_wrong_options_are_named():
    with pytest.raises(RecipeError, match="train.optimizer must be adamw, muon, group_muon, got 'sgd'"):
        TrainOptions(optimizer="sgd")
    for name in ("muon", "group_muon"):
        with pytest.raises(RecipeError, match=f"train.optimizer {name} needs whole matrices"):
            TrainOptions(optimizer=name, sharding="fsdp")
