"""The choice between the dense and the Fourier algorithm: what it depends on, and that nothing but the cost does."""

import copy
import itertools
import re

import pytest
import torch

from revit.evaluation.complexity import measured_macs
from revit.groups import Group
from revit.models import create_model
from revit.nn import GroupConv, GroupConvAttention, GroupLinear, GroupMLP, fourier, set_algorithm
from revit.nn.algorithm import FEW, INFERENCE, MARGIN, TRAINING, Algorithm, Work


def work(group="p8", fields=48, out=144, kernel_size=5, functions=11):
    return Work(Group.parse(group), fields, out, kernel_size, functions)


def test_many_fields_and_large_groups_take_fourier_few_do_not():
    assert Algorithm("auto", work(), "steerable").is_fourier(14 * 14)
    assert not Algorithm("auto", work(), "steerable").is_fourier(1)  # a call costs more than what it saves
    assert not Algorithm("auto", work("p4", 4, 4, 3, 6), "steerable").is_fourier(10**6)
    assert not Algorithm("auto", work("z2", 96, 288, 5, 11), "steerable").is_fourier(14 * 14)  # nothing to diagonalise


def test_from_its_threshold_on_fourier_is_predicted_to_be_faster_and_below_it_is_not():
    cases = (work(), work("p4m", 24, 72, 3, 6), work("p16", 12, 36, 5, 11), work("p8m", 64, 256, 1, 1))
    for case, rates in itertools.product(cases, (INFERENCE, TRAINING)):
        least = case.fourier_from(rates)

        def gain(positions, case=case, rates=rates):
            dense = rates.dense.call + rates.samples * positions * case.dense_seconds(rates.dense)
            return dense / (rates.fourier.call + rates.samples * positions * case.fourier_seconds(rates.fourier))

        assert gain(least) >= MARGIN and (least == FEW or gain(least - 1) < MARGIN)
        assert all(gain(least + more) >= MARGIN for more in (1, 100, 10**5))


@pytest.mark.parametrize(("positions", "called"), [((14, 14), True), ((1, 2), False)])
def test_auto_runs_what_it_says(monkeypatch, positions, called):
    layer = GroupConv("p8", 32, 96, 5, padding=2, filters="steerable").double()
    calls = []
    transform = fourier.transform
    monkeypatch.setattr(fourier, "transform", lambda *inputs: calls.append(1) or transform(*inputs))
    x = torch.randn(1, 32, 8, *positions, dtype=torch.float64)
    with torch.no_grad():
        out = layer(x)
    assert bool(calls) == called == layer.algorithm.is_fourier(positions[0] * positions[1])
    dense = copy.deepcopy(layer)
    set_algorithm(dense, "dense")
    torch.testing.assert_close(out, dense(x), rtol=0, atol=1e-10)
    assert (layer.multiply_adds(*positions) < dense.multiply_adds(*positions)) == called


def test_exported_programs_take_any_size_so_auto_is_dense_there():
    layer = GroupLinear("p8", 128, 512)
    assert layer.algorithm.is_fourier(14 * 14)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(layer, (torch.randn(2, 128, 8, 14, 14),), dynamic_shapes=({0: batch},))
    x = torch.randn(3, 128, 8, 14, 14)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-4)


def test_the_choice_is_printed():
    shown = re.search(r"fourier from (\d+) positions on, in training from (\d+) on \(auto\)", repr(GroupLinear("p8m", 64, 256)))
    assert shown and int(shown[1]) < 14 * 14 and int(shown[2]) < 14 * 14
    assert "dense (auto)" in repr(GroupConv("p8", 48, 144, 3, filters="rbf"))  # these filters do not turn into each other


def test_the_choice_for_layers_in_one_go():
    """By the layer alone: large groups take it at the paper's width, small ones do not; one dense layer is enough for none."""
    mlp = GroupMLP("p16", 12)
    shown = re.search(r"in one go from (\d+) positions on in training", repr(mlp))
    assert shown and mlp.chain.least == int(shown[1]) <= 14 * 14
    x = torch.randn(2, 12, 16, 14, 14)
    assert mlp.chain.is_fourier_for(x) and not mlp.chain.is_fourier_for(x[..., :5, :5]) and not mlp.chain.is_fourier_for(x[:0])
    mlp.fc2.algorithm = mlp.fc2.algorithm.renamed("dense")
    assert not mlp.chain.is_fourier_for(x)
    assert "layer by layer" in repr(GroupMLP("p4", 12))
    assert "in one go" in repr(GroupConvAttention("p16", 12, 1, attention="spatial"))
    assert "in one go" not in repr(GroupConvAttention("p16", 12, 1, attention="joint"))


def test_a_whole_model_is_set_at_once_and_computes_the_same():
    """Outputs and gradients; separable projections have layers that cannot mix fields and stay dense."""
    torch.manual_seed(0)
    results = []
    model = create_model("revit_tiny", group="p4m", in_chans=1, filters="steerable").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(3, 1, 12, 12, dtype=torch.float64)
    for name in ("dense", "fourier"):
        set_algorithm(model, name)
        logits = model(x)
        results.append((logits, *torch.autograd.grad(logits.sin().sum(), list(model.parameters()))))
    names = {str(module.algorithm) for module in model.modules() if hasattr(module, "algorithm")}
    assert names == {"dense", "fourier"}
    for dense, blocks in zip(*results, strict=True):
        torch.testing.assert_close(blocks, dense, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="^unknown algorithm 'fast'; choose auto, dense, fourier$"):
        set_algorithm(model, "fast")


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_parts_of_a_batch_are_those_of_the_whole(monkeypatch, batch):
    """Samples that go through the steps at a time, in both directions."""
    layer = GroupConv("p4m", 3, 4, 3, padding=1, filters="free", algorithm="fourier").double()
    x = torch.randn(batch, 3, 8, 4, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for cache in (1, 2**13, 2**30):
        monkeypatch.setattr(fourier, "CACHE", cache)
        out = layer(x)
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    for result in results[1:]:
        for some, others in zip(results[0], result, strict=True):
            torch.testing.assert_close(some, others, rtol=0, atol=1e-11)


def test_half_precision_is_that_of_the_dense_layer():
    layer = GroupLinear("p4", 6, 5, algorithm="fourier")
    x = torch.randn(2, 6, 4, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.05)


def test_gradients_of_weights_alone():
    layer = GroupLinear("p4", 2, 3, algorithm="fourier").double()
    x = torch.randn(2, 2, 4, 2, 2, dtype=torch.float64)
    (layer(x) ** 2).sum().backward()
    dense = GroupLinear("p4", 2, 3, algorithm="dense").double()
    dense.load_state_dict(layer.state_dict())
    (dense(x) ** 2).sum().backward()
    torch.testing.assert_close(layer.weight.grad, dense.weight.grad, rtol=0, atol=1e-11)


def test_blocks_are_kept_in_inference_until_the_weight_changes():
    layer = GroupLinear("p4", 2, 3, algorithm="fourier")
    x = torch.randn(1, 2, 4, 2, 2)
    with torch.no_grad():
        layer(x)
        kept = layer.filters.blocks()
        assert layer.filters.blocks() is kept
        layer.weight.data.mul_(2)
        assert layer.filters.blocks() is not kept
        dense = GroupLinear("p4", 2, 3, algorithm="dense")
        dense.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sight", [("", [1, 1, 0, 1]), ("steerable", [3, 1, 1, 1])])
def test_the_operation_keeps_what_torch_asks_of_one(sight):
    """Its schema, its shapes without data, its gradients, and that nothing of it is lost in a traced program."""
    functions = 6 if sight[0] else 1
    x = torch.randn(3, 2, 4, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2 * functions, 4, dtype=torch.float64)
    blocks = [block.requires_grad_() for block in fourier.weight_blocks(weight, Group.parse("p4"))]
    torch.library.opcheck(torch.ops.revit.fourier_transform.default, (x, blocks, "p4", *sight))


def test_products_on_threads_are_counted(monkeypatch):
    monkeypatch.setattr(fourier, "CACHE", 1)  # a part for each sample
    layer = GroupConv("p8", 4, 3, 3, padding=1, filters="steerable", algorithm="fourier")
    x = torch.randn(5, 4, 8, 6, 7)
    counted = measured_macs(layer, x)
    assert (counted.convolution, counted.attention) == (layer.multiply_adds(6, 7), 0)
