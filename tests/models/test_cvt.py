"""CvT: its function against `nn.MultiheadAttention`, its published size and cost, and that it is not equivariant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.equivariance import equivariance_error
from revit.evaluation.complexity import count_macs, measured_macs
from revit.models import create_model
from revit.models.cvt import CvT
from tests.models.networks import count

SMALL = {"in_chans": 2, "num_classes": 3, "dims": (8, 12), "depths": (1, 2), "num_heads": (2, 3)}


def small(**options):
    return create_model("cvt_tiny", **{**SMALL, **options})


def warmed(x, **options):
    """A small model in the dtype of x, in eval mode, whose batch norms know x."""
    model = small(**options).to(x.dtype)
    with torch.no_grad():
        model(x)
    return model.eval()


def test_parameter_counts():
    assert count(create_model("cvt_tiny", in_chans=1)) == 44_306
    assert count(small()) - count(small(pool="mean")) == 12


def test_the_published_model():
    """CvT-13 at 224 pixels: 20 M parameters and 4.5 G multiply-adds in the paper of Wu et al."""
    model = CvT()
    assert count(model) == 19_997_480 and count(model) == pytest.approx(20e6, rel=2e-3)
    assert list(model.check_input_size(224).values()) == [(56, 56), (28, 28), (14, 14)]
    cost = count_macs(model, 224)
    assert cost.total == pytest.approx(4.53e9, rel=0.01)
    embed = model.stages[0].embed.proj
    assert (embed.kernel_size, embed.stride, embed.padding) == ((7, 7), (4, 4), (2, 2))
    embed = model.stages[2].embed.proj
    assert (embed.kernel_size, embed.stride, embed.padding) == ((3, 3), (2, 2), (1, 1))


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("size", [(28, 28), (20, 33)])
@pytest.mark.parametrize("kv_stride", [1, 2])
def test_cost_by_formula_is_the_cost_counted(pool, size, kv_stride):
    model = small(pool=pool, kv_stride=kv_stride)
    formula, counted = count_macs(model, size), measured_macs(model, torch.randn(3, 2, *size))
    assert (formula.convolution, formula.attention) == (counted.convolution, counted.attention)


def test_cost_of_attention():
    """Of 28 pixels remain 7 x 7 queries and 4 x 4 keys, then 4 x 4 and 2 x 2, and the class token."""
    assert count_macs(small(), 28).attention == 2 * (49 * 16 * 8 + 2 * 17 * 5 * 12)


@pytest.mark.parametrize("options", [{}, {"pool": "mean"}, {"kv_stride": 1}, {"stride": 2}])
def test_it_is_not_equivariant(options):
    """The guard of every audit: it has no position encoding, but its filters know which way is up."""
    x = torch.randn(4, 2, 32, 32)
    model = warmed(x, **options)
    assert not [name for name, _ in model.named_parameters() if "pos" in name]
    for feature in ("lift", "pre_class", "logits"):
        errors = equivariance_error(model, x, "p4m", feature=feature, relative=True)
        assert errors[0] == 0 and errors[1:].min() > 1e-2, (feature, errors)


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("size", [(28, 28), (33, 20)])
def test_against_the_equations(pool, size):
    """The whole model from plain convolutions and `nn.MultiheadAttention`; the class token joins in the last stage."""
    x = torch.randn(3, 2, *size, dtype=torch.float64)
    model = warmed(x, pool=pool)

    def linear(layer, x):
        return F.linear(x, layer.weight, layer.bias)

    def norm(layer, x):
        return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, 1e-6)

    def attend(attn, x, token):  # x [B, H, W, D]
        def convolved(layers, stride):
            conv, bn = layers
            out = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, None, stride, 1, groups=x.shape[-1])
            out = F.batch_norm(out, bn.running_mean, bn.running_var, bn.weight, bn.bias)
            return torch.cat((token, out.permute(0, 2, 3, 1).flatten(1, 2)), 1)

        reference = nn.MultiheadAttention(x.shape[-1], attn.num_heads, batch_first=True).double()
        with torch.no_grad():
            reference.in_proj_weight.copy_(torch.cat((attn.q.weight, attn.k.weight, attn.v.weight)))
            reference.in_proj_bias.copy_(torch.cat((attn.q.bias, attn.k.bias, attn.v.bias)))
        reference.out_proj.weight, reference.out_proj.bias = attn.proj.weight, attn.proj.bias
        queries, keys, values = convolved(attn.conv_q, 1), convolved(attn.conv_k, 2), convolved(attn.conv_v, 2)
        return reference(queries, keys, values, need_weights=False)[0]

    grid = x.permute(0, 2, 3, 1)
    for i, stage in enumerate(model.stages):
        stride, padding = ((4, 2), (2, 1))[i]
        conv = stage.embed.proj
        grid = F.conv2d(grid.permute(0, 3, 1, 2), conv.weight, conv.bias, stride, padding).permute(0, 2, 3, 1)
        grid = norm(stage.embed.norm, grid)
        shape = grid.shape[1:3]
        token = model.cls_token.expand(3, 1, 12) if i == 1 and pool == "token" else grid.new_zeros(3, 0, grid.shape[-1])
        for block in stage.blocks:
            tokens = torch.cat((token, grid.flatten(1, 2)), 1)
            normed = norm(block.norm1, tokens)
            count_token = token.shape[1]
            tokens = tokens + attend(block.attn, normed[:, count_token:].unflatten(1, shape), normed[:, :count_token])
            hidden = F.gelu(linear(block.mlp[0], norm(block.norm2, tokens)))
            tokens = tokens + linear(block.mlp[3], hidden)
            token, grid = tokens[:, :count_token], tokens[:, count_token:].unflatten(1, shape)
    read = token[:, 0] if pool == "token" else norm(model.norm, grid).mean((1, 2))
    read = norm(model.norm, read) if pool == "token" else read
    torch.testing.assert_close(model(x), linear(model.head, read), rtol=0, atol=1e-12)


def test_named_features_are_maps_without_the_class_token():
    x = torch.randn(2, 2, 28, 20)
    model = warmed(x)
    features = model.named_features(x)
    maps = ["lift", "stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1", "pre_class"]
    assert list(features) == [*maps, "logits"]
    assert [tuple(features[name].shape[1:]) for name in maps] == [(8, 7, 5)] * 2 + [(12, 4, 3)] * 3
    assert model.check_input_size(28, 20) == {"stages.0.embed": (7, 5), "stages.1.embed": (4, 3)}
    tokens = model.forward_features(x)  # [B, 1 + 12, 12]
    torch.testing.assert_close(features["pre_class"][:, :, 2, 1], tokens[:, 1 + 2 * 3 + 1])
    torch.testing.assert_close(features["logits"], model(x))


def test_pooling():
    x = torch.randn(2, 2, 28, 28)
    for pool, tokens in (("token", 17), ("mean", 16)):
        model = warmed(x, pool=pool)
        features = model.forward_features(x)
        assert features.shape == (2, tokens, 12)
        expected = features[:, 0] if pool == "token" else features.sum(1) / 16
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)
        torch.testing.assert_close(model(x), model.head(expected))


@pytest.mark.parametrize("options", [{}, {"pool": "mean"}, {"kv_stride": 1, "stride": 2}])
@pytest.mark.parametrize("size", [(28, 28), (32, 97)])
def test_gradients_reach_every_parameter(options, size):
    """With a class token, the last block's queries of the positions are read by nobody: their convolution has none."""
    x = torch.randn(3, 2, *size)
    model = warmed(x, **options)
    F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    unread = [f"stages.1.blocks.1.attn.conv_q.{name}" for name in ("0.weight", "1.weight", "1.bias")]
    assert missing == ([] if "pool" in options else unread)


def test_any_size_works_from_the_stride_on():
    model = small().eval()
    assert model.min_input_size == 4 and model(torch.randn(1, 2, 4, 9)).shape == (1, 3)
    for check in (lambda: model.check_input_size(3, 8), lambda: model(torch.zeros(1, 2, 3, 8))):
        with pytest.raises(ValueError, match="^images of 3 x 8 are below the minimum of 4 x 4 of this model$"):
            check()


def test_classifier_can_be_replaced():
    x = torch.randn(2, 2, 28, 28, dtype=torch.float64)
    model = warmed(x)
    assert model.get_classifier().out_features == 3
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model(x).dtype == torch.float64 and model.num_classes == 5 and not model.head.training
    model.reset_classifier(0)
    assert model(x).shape == (2, 12) and isinstance(model.get_classifier(), nn.Identity) and model.num_classes == 0


def test_weight_decay_spares_norms_biases_and_the_token():
    model = small()
    spared = model.no_weight_decay()
    assert {"cls_token", "norm.weight", "stages.0.embed.norm.bias", "stages.0.blocks.0.attn.conv_q.1.weight"} <= spared
    kept = {name for name, _ in model.named_parameters()} - spared
    assert all(name.endswith(".weight") and "norm" not in name for name in kept)
    assert {"stages.0.embed.proj.weight", "stages.0.blocks.0.attn.conv_q.0.weight", "head.weight"} <= kept


def test_regularisers_act_in_training_only():
    x = torch.randn(4, 2, 28, 28)
    plain = warmed(x)
    for rate in ("drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = small(**{rate: 0.5})
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model.eval()(x), plain.eval()(x))
        trained = plain.train()(x)
        assert not torch.allclose(model.train()(x), trained)
        plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "p4"}, "^a CvT is not equivariant: its group is z2, got p4; REViT and G-CNN models take it$"),
        ({"group": "z2m"}, "a CvT is not equivariant: its group is z2, got z2m"),
        ({"group": "p7q"}, "unknown group 'p7q'"),
        ({"num_heads": (1, 3)}, "num_heads=3 does not divide the 34 channels; choose 1, 2, 17, 34"),
        ({"dims": (8, 16, 32)}, r"same number of stages is needed in dims=\(8, 16, 32\), depths=\(1, 2\)"),
        ({"depths": (1, 0)}, r"depths must be whole numbers >= 1, got \(1, 0\)"),
        ({"stride": 0}, "stride must be whole numbers >= 1, got 0"),
        ({"stride": (4, 2)}, r"^stride of a CvT is one number, got \(4, 2\)$"),
        ({"kv_stride": 0}, "kv_stride must be whole numbers >= 1, got 0"),
        ({"in_chans": 0}, "in_chans must be whole numbers >= 1, got 0"),
        ({"pool": "max"}, "unknown pool 'max'; choose token, mean"),
        ({"mlp_ratio": 0.01}, "mlp_ratio=0.01 leaves no hidden channel of 20; choose at least 0.05"),
        ({"num_classes": -1}, "a head needs num_classes >= 0, got -1"),
        ({"drop_rate": 1.0}, r"drop_rate must be in \[0, 1\), got 1.0"),
        ({"attn_drop_rate": -0.1}, r"attn_drop_rate must be in \[0, 1\), got -0.1"),
        ({"filters": "free"}, "model 'cvt_tiny': .*unexpected keyword argument 'filters'"),
        ({"features_only": True}, "^features_only needs a model on a group; a CvT gives its maps by named_features$"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_model("cvt_tiny", **options)


def test_the_trivial_group_is_taken():
    assert isinstance(create_model("cvt_tiny", group="z2"), CvT) and create_model("cvt_tiny", group="C1").group.name == "z2"
