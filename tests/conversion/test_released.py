"""Conversion without escnn: released state dicts that are made from models of ours lead back to them."""

import pytest
import torch

from revit.conversion import ConversionError, convert_released
from tests.conversion.released_states import FLAT, WINDOWED, make_model, released_state

IMAGES = {False: (3, 2, 13, 13), True: (3, 3, 33, 33)}


@pytest.mark.parametrize("evaluated", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("windowed", [False, True], ids=["flat", "windowed"])
@pytest.mark.parametrize("group", ["p4", "p4m", "p8"])
def test_same_logits(group, windowed, evaluated):
    model = make_model(group, windowed=windowed)
    sizes = WINDOWED if windowed else FLAT
    converted = convert_released(
        released_state(model, evaluated=evaluated), num_heads=sizes["num_heads"], window_size=sizes.get("window_size", 7)
    )
    assert converted.arguments["group"] == group and converted.leftover < 1e-12
    x = torch.randn(IMAGES[windowed], dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(converted.model(x), expected, rtol=0, atol=1e-10)
    assert expected.std(0).min() > 1e-4  # logits that do not depend on the image would prove nothing


@pytest.mark.parametrize("group", ["z2", "z2m", "p2", "p8m", "p12", "p16"])
def test_group_is_found(group):
    """Groups of equal order differ in how their filters turn: z2m and p2, p8m and p16."""
    state = released_state(make_model(group, depths=1, dims=2))
    assert convert_released(state, num_heads=1).arguments["group"] == group


def test_options_are_read_from_shapes():
    model = make_model("p4", kernel_size=1, stride=2, mlp_ratio=3, head_hidden=7, dtype=torch.float32)
    converted = convert_released(released_state(model, names=""), num_heads=2, num_classes=3)
    expected = {"dims": 4, "depths": 2, "stride": 2, "kernel_size": 1, "mlp_ratio": 3, "head_hidden": 7, "num_heads": 2}
    assert expected.items() <= converted.arguments.items()
    assert (converted.in_chans, converted.num_classes) == (2, 3)
    assert next(converted.model.parameters()).dtype == torch.float32
    x = torch.randn(2, 2, 13, 13)
    with torch.no_grad():
        torch.testing.assert_close(converted.model(x), model(x)[:, :3], rtol=0, atol=1e-5)


def test_filter_alone_is_enough():
    """A state dict saved in eval mode from which the functions were left out."""
    model = make_model("p8")
    state = {k: v for k, v in released_state(model, evaluated=True).items() if "sampled_basis" not in k}
    x = torch.randn(2, 2, 13, 13, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(convert_released(state, num_heads=2).model(x), model(x), rtol=0, atol=1e-10)


def test_filter_of_a_model_that_never_ran_is_ignored():
    """escnn registers a filter of zeros, which its first call of `train` or `eval` replaces."""
    state = released_state(make_model("p4"), evaluated=True)
    state |= {key: torch.zeros_like(value) for key, value in state.items() if key.endswith(".filter")}
    convert_released(state, num_heads=2)


@pytest.fixture(scope="module")
def state():
    return released_state(make_model("p4"), evaluated=True, names="")


@pytest.mark.parametrize(
    "key",
    [
        "lift.bn.batch_norm_[4].running_var", "blocks.1.attn.to_k.weights", "blocks.0.alpha2",
        "blocks.1.norm2.batch_norm_[4].weight", "blocks.0.mlp.net.5.batch_norm_[4].bias",
        "head.fc1.weight", "head.bn.running_mean", "head.fc2.bias",
    ],
)  # fmt: skip
def test_missing_key_is_named(state, key):
    with pytest.raises(ConversionError) as caught:
        convert_released({k: v for k, v in state.items() if k != key}, num_heads=2)
    assert f"the key {key} is missing" in str(caught.value)


def test_missing_block_is_named(state):
    with pytest.raises(ConversionError, match=r"the key blocks\.0\.norm1\.batch_norm_\[4\]\.weight is missing"):
        convert_released({k: v for k, v in state.items() if not k.startswith("blocks.0.")}, num_heads=2)


def test_unknown_keys_are_named(state):
    with pytest.raises(ConversionError, match=r"1 unknown keys: blocks\.0\.attn\.to_q\.bias$"):
        convert_released({**state, "blocks.0.attn.to_q.bias": torch.zeros(4)}, num_heads=2)
    with pytest.raises(ConversionError, match=r"'\\x1b\[2Jbad\\n'"):
        convert_released({**state, "\x1b[2Jbad\n": torch.zeros(4)}, num_heads=2)


@pytest.mark.parametrize(
    ("key", "shape"),
    [("head.fc2.weight", (5, 3)), ("blocks.0.alpha1", (2,)), ("lift.bn.batch_norm_[4].bias", (3,)),
     ("blocks.1.attn.to_q.weights", (7,)), ("blocks.1.attn.to_v.filter", (16, 16, 5, 5)),
     ("head.fc1.bias", ()), ("blocks.0.attn.to_out.weights", (4, 16))],
)  # fmt: skip
def test_wrong_shape_is_named(state, key, shape):
    with pytest.raises(ConversionError) as caught:
        convert_released({**state, key: torch.zeros(shape)}, num_heads=2)
    assert key in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("without", ["sampled_basis", ".filter"])
def test_nothing_but_our_errors(state, without):
    """Whatever tensor is spoilt: one line, never an error of torch."""
    state = {key: value for key, value in state.items() if not key.endswith(without)}
    for key in state:
        if key.startswith("blocks.1") or "indices" in key or key.endswith("num_batches_tracked"):
            continue
        for spoilt in (torch.tensor(1.0), torch.ones(0), torch.ones(2, 3, 3, 3)):
            with pytest.raises(ConversionError):
                convert_released({**state, key: spoilt}, num_heads=2)


def test_values_that_cannot_be(state):
    key = "blocks.1.attn.to_q.filter"
    with pytest.raises(ConversionError, match=r"blocks\.1\.attn\.to_q\.filter is not what .* expand to"):
        convert_released({**state, key: state[key] + 0.1}, num_heads=2)
    with pytest.raises(ConversionError, match=r"head\.fc1\.bias holds NaN"):
        convert_released({**state, "head.fc1.bias": torch.full((2,), float("nan"))}, num_heads=2)
    for layer, text in (
        ("lift.conv", "do not turn as those of p4 or p2m"),
        ("blocks.0.attn.to_q", "do not turn as those of p4 "),
    ):
        (key,) = (k for k in state if k.startswith(layer) and k.endswith("sampled_basis"))
        changed = {k: v for k, v in state.items() if not k.endswith(".filter")} | {key: torch.randn(state[key].shape)}
        with pytest.raises(ConversionError, match=text):
            convert_released(changed, num_heads=2)


def test_coefficients_alone_are_not_enough(state):
    bare = {k: v for k, v in state.items() if not k.endswith(("sampled_basis", ".filter"))}
    with pytest.raises(ConversionError, match=r"neither the sampled functions nor the filter of lift\.conv"):
        convert_released(bare, num_heads=2)


def test_heads(state):
    with pytest.raises(ConversionError, match=r"not in its state dict: give --num-heads \(the released code names its files"):
        convert_released(state)
    with pytest.raises(ConversionError, match="heads of 2 stages were given, the model has 1"):
        convert_released(state, num_heads=[1, 2])
    with pytest.raises(ValueError, match="num_heads=3 does not divide the 4 fields"):
        convert_released(state, num_heads=3)
    preset = released_state(make_model("z2", windowed=True, dims=(12, 24, 48, 96), depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)))
    assert convert_released(preset).arguments["num_heads"] == [1, 2, 4, 8]


@pytest.mark.parametrize("tensors", [{}, {"a.weight": torch.zeros(2)}, {"x.batch_norm_[4].weight": torch.zeros(2)}])
def test_other_models_are_refused(tensors):
    with pytest.raises(ConversionError, match="not a model of the released code"):
        convert_released(tensors, num_heads=2)
