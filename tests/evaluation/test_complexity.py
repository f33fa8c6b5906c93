"""Costs: formulas written out from the paper, torch's own counter, and memory that is really taken."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from revit import create_model
from revit.evaluation.complexity import MultiplyAdds, count_macs, measured_macs, parameter_macs
from revit.evaluation.complexity_figures import draw_cost
from revit.evaluation.memory import forward_memory, in_fresh_process, peak_memory, step_memory
from revit.groups import Group
from tests.evaluation.test_figures import check_png, words

MIB = 2**20


def build(**options):
    torch.manual_seed(0)
    return create_model("revit_tiny", **{"in_chans": 1, "dims": 4, "depths": 2, "group": "p4", **options})


@pytest.mark.parametrize("group", ["z2", "z2m", "p4", "p8", "p4m"])
@pytest.mark.parametrize("attention", ["joint", "spatial", "per_element"])
@pytest.mark.parametrize("projection", ["full", "separable"])
@pytest.mark.parametrize("window", [None, 3])
def test_formulas_of_the_paper_and_torch_agree_to_the_unit(group, attention, projection, window):
    """SPEC: |G|^2 C_in C_out k^2 HW, lifting |G| C_in C_out k^2 HW, attention 2 (HW)^2 C |G|, joint 2 (|G| HW)^2 C."""
    sides = {"neighbourhood": "window", "window_size": window} if window else {"neighbourhood": "global"}
    model = build(group=group, attention=attention, projection=projection, kernel_size=3, **sides)
    order, pixels, fields, depth = Group.parse(group).order, 6 * 6, 4, 2
    pair = order**2 * fields**2 * pixels
    qkv = 3 * 9 * pair if projection == "full" else 9 * pair // fields + 3 * pair
    lifting = order * fields * 4**2 * pixels  # kernel 4, stride 2
    head = 4 * 32 + 32 * 10
    keys = pixels if window is None else window**2
    scores = 2 * pixels * keys * fields * {"joint": order**2, "spatial": order, "per_element": order}[attention]
    expected = lifting + depth * (qkv + (1 + 4 + 4) * pair) + head, depth * scores
    for found in (count_macs(model, 12), measured_macs(model, torch.randn(3, 1, 12, 12))):
        assert (found.convolution, found.attention) == expected
        assert found.total == sum(expected)


def test_padded_windows_and_neighbours_are_counted_as_computed():
    for sides in ({"neighbourhood": "window", "window_size": 5}, {"neighbourhood": "local", "window_size": 3}):
        model = build(**sides, filters="steerable")
        assert count_macs(model, 12).total == measured_macs(model, torch.randn(2, 1, 12, 12)).total
    assert count_macs(model, 12).attention == 2 * 2 * 36 * 9 * 4 * 4**2  # two layers, HW w^2 pairs, C, |G|^2


def test_layers_are_named_and_add_up():
    found = count_macs(build(), 12)
    assert sum(found.layers.values()) == found.total
    assert found.layers["stem.0.conv"] == 4 * 4 * 4**2 * 36
    assert found.layers["stages.0.blocks.1.attn"] == found.attention // 2
    assert found.layers["head.fc"] == 320


class Shared(nn.Module):
    """Torch's own layers, one of them called twice."""

    in_chans = 2

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.fc(self.fc(self.conv(x).mean((-2, -1))))


def test_torch_layers_count_as_often_as_they_are_called():
    model = Shared()
    expected = MultiplyAdds(4 * 1 * 9 * 5 * 7 + 2 * 16, 0, {"conv": 1260, "fc": 32})
    assert count_macs(model, (5, 7)) == expected
    assert measured_macs(model, torch.randn(3, 2, 5, 7)) == MultiplyAdds(expected.convolution, 0)
    assert parameter_macs(model, (5, 7)) == 72 // 2 * 35 + 2 * 16


def test_unfused_attention_is_attention():
    class Plain(nn.Module):
        def forward(self, x):
            tokens = x.flatten(2)  # [B, C, HW]
            return tokens @ (tokens.mT @ tokens).softmax(-1)

    assert measured_macs(Plain(), torch.randn(3, 2, 4, 4)) == MultiplyAdds(0, 2 * 16**2 * 2)


def test_counting_leaves_no_trace():
    model = build().train()
    model.stem.eval()
    count_macs(model, 12), measured_macs(model, torch.randn(2, 1, 12, 12)), parameter_macs(model, 12)
    assert model.training and not model.stem.training
    assert not any(module._forward_hooks for module in model.modules())
    assert int(model.stages[0].blocks[0].norm1.num_batches_tracked) == 0


@pytest.mark.parametrize(("group", "order", "dims"), [("z2", 1, 16), ("p4", 4, 8)])
def test_counters_of_parameters(group, order, dims):
    """SPEC A3.1: C d(3) weights lift, C^2 |G| (3 d(5) + 9) are in a block, with d(3) = 6 and d(5) = 11; |G| HW positions."""
    model = create_model("revit_tiny_paper", group=group, in_chans=1, stride=1, dims=dims)
    weights = dims * 6 + 4 * dims**2 * order * (3 * 11 + 9)
    assert parameter_macs(model, 12) == weights * order * 144 + dims * (dims // 2) + (dims // 2) * 10


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ValueError, match="Linear does not say how many channels its images have: set its attribute in_chans"):
        count_macs(nn.Linear(2, 2), 28)
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        count_macs(Shared(), 0)


def peaks():
    """Of a task that takes 64 MiB and gives them back, and of one that takes nothing."""
    return peak_memory(lambda: np.full(64 * MIB, 1, np.uint8)), peak_memory(lambda: None)


def test_peak_memory_sees_what_a_task_takes_and_gives_back():
    """In a fresh process: where the high-water mark cannot be reset, what earlier tests took hides the task."""
    taken, nothing = in_fresh_process(peaks)
    assert 63 * MIB < taken < 72 * MIB
    assert nothing < 4 * MIB


def measure(kind, size):
    model = build(attention="spatial", neighbourhood="global").train()
    measure = forward_memory if kind == "forward" else step_memory
    return os.getpid(), measure(model, torch.randn(8, 1, size, size)) / MIB


def fail(how):
    if how == "dies":
        os._exit(9)
    raise ValueError("nothing to measure")


def test_failures_in_a_fresh_process_are_told():
    with pytest.raises(ValueError, match="nothing to measure"):
        in_fresh_process(fail, "raises")
    with pytest.raises(RuntimeError, match=r"the measuring process ended with code 9: out of memory\?"):
        in_fresh_process(fail, "dies")


def test_a_step_takes_more_than_a_pass_in_a_process_of_its_own():
    (one, forward), (two, step) = (in_fresh_process(measure, kind, 48) for kind in ("forward", "step"))
    assert len({os.getpid(), one, two}) == 3
    maps = 8 * 4 * 4 * 24**2 * 4 / MIB  # one map of features of the batch, float32
    assert 2 * maps < forward < step and step > 2 * 10 * maps  # each block keeps at least ten for its backward pass


ROWS = [
    {"model": "revit", "attention": attention, "projection": "full", "group": group, "order": order}
    | {"counted_convolution_macs": order * 10**7, "counted_attention_macs": 10**6, "step_bytes": order * MIB}
    | {"step_seconds": order / 500}
    for attention in ("spatial", "joint")
    for group, order in (("z2", 1), ("p4", 4), ("p8", 8), ("p4m", 8))
]


def test_draw_cost(tmp_path):
    draw_cost(ROWS, tmp_path / "cost.svg")
    texts = words(tmp_path / "cost.svg")
    assert {"Multiply-adds", "per image (millions)", "peak (MiB)", "per image (ms)", "elements of the group"} <= set(texts)
    assert texts.count("revit spatial full") == texts.count("revit joint full") == 1
    assert {"z2", "p4", "p8", "p4m", "10", "20", "50", "with mirrors"} <= set(texts)
    (tmp_path / "png").mkdir()
    draw_cost([*ROWS, {**ROWS[0], "model": "vit", "attention": None, "projection": None}], tmp_path / "png" / "cost.png")
    check_png(tmp_path / "png" / "cost.png")
    draw_cost(ROWS[:3], tmp_path / "turns.svg")
    assert "with mirrors" not in words(tmp_path / "turns.svg")
    with pytest.raises(ValueError, match="no costs to draw: the rows are empty"):
        draw_cost([], tmp_path / "none.png")


def test_a_plain_transformer_has_its_formula():
    model = create_model("vit_tiny", in_chans=1).eval()
    formula, counted = count_macs(model, 28), measured_macs(model, torch.randn(2, 1, 28, 28))
    assert (formula.convolution, formula.attention) == (counted.convolution, counted.attention)
    assert formula.attention == 5 * 2 * 50**2 * 26  # five blocks, 49 patches and a class token, 26 channels


def test_memory_below_what_can_be_measured_is_drawn(tmp_path):
    row = {"model": "a", "attention": None, "projection": None, "group": "z2", "order": 1, "counted_convolution_macs": 9,
           "counted_attention_macs": 0, "step_bytes": 0, "step_seconds": 1e-3}  # fmt: skip
    draw_cost([row], tmp_path / "cost.png")
    assert (tmp_path / "cost.png").is_file()
