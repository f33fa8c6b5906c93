"""The plain ViT: its function against `nn.MultiheadAttention`, its sizes, and that it is not equivariant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.equivariance import equivariance_error
from revit.models import ViT, create_model
from tests.models.networks import count

SMALL = {"in_chans": 2, "num_classes": 3, "dims": 8, "depths": 2}


def small(**options):
    return create_model("vit_tiny", **{**SMALL, **options})


def test_parameter_counts():
    assert count(create_model("vit_tiny", in_chans=1)) == 44_314
    model = create_model("vit_small_patch16")
    assert count(model) == 22_050_280 == pytest.approx(22.05e6, rel=1e-4)
    assert model.blocks[0].mlp[0].out_features == 1536 and model.num_classes == 1000


@pytest.mark.parametrize("name", ["vit_tiny", "vit_small_patch16"])
def test_it_is_not_equivariant(name):
    """The guard of every audit: far from zero under each quarter turn and mirror, for features and logits."""
    model = create_model(name, in_chans=1, num_classes=5, depths=1, dims=24).eval()
    x = torch.randn(4, 1, 32, 32)
    for feature in ("lift", "pre_class", "logits"):
        errors = equivariance_error(model, x, "p4m", feature=feature, relative=True)
        assert errors[0] == 0 and errors[1:].min() > 1e-2, (feature, errors)


def test_against_the_equations():
    """The whole model from `nn.MultiheadAttention` and unfolded patches, with the class token first."""
    model = small(num_heads=4).double().eval()
    x = torch.randn(3, 2, 28, 28, dtype=torch.float64)
    patches = F.unfold(x, 4, stride=4).transpose(1, 2)  # [B, 49, 2*16]
    tokens = patches @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias
    tokens = tokens + model.pos_embed.flatten(2).transpose(1, 2)
    tokens = torch.cat((model.cls_token.expand(3, 1, 8), tokens), 1)
    for block in model.blocks:
        attention = nn.MultiheadAttention(8, 4, batch_first=True).double()
        attention.in_proj_weight, attention.in_proj_bias = block.attn.qkv.weight, block.attn.qkv.bias
        attention.out_proj.weight, attention.out_proj.bias = block.attn.proj.weight, block.attn.proj.bias
        normed = block.norm1(tokens)
        tokens = tokens + attention(normed, normed, normed, need_weights=False)[0]
        hidden = F.gelu(F.linear(block.norm2(tokens), block.mlp[0].weight, block.mlp[0].bias))
        tokens = tokens + F.linear(hidden, block.mlp[3].weight, block.mlp[3].bias)
    expected = F.linear(model.norm(tokens)[:, 0], model.head.weight, model.head.bias)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_named_features_are_maps_without_the_class_token():
    model = small().eval()
    x = torch.randn(2, 2, 28, 20)
    features = model.named_features(x)
    assert list(features) == ["lift", "blocks.0", "blocks.1", "pre_class", "logits"]
    assert all(features[name].shape == (2, 8, 7, 5) for name in list(features)[:4])
    torch.testing.assert_close(features["lift"], model.patch_embed(x))
    tokens = model.forward_features(x)  # [B, 1 + 35, 8]
    torch.testing.assert_close(features["pre_class"][:, :, 2, 3], tokens[:, 1 + 2 * 5 + 3])
    torch.testing.assert_close(features["logits"], model(x))


def test_pooling():
    x = torch.randn(2, 2, 28, 28)
    for pool, tokens in (("token", 50), ("mean", 49)):
        model = small(pool=pool).eval()
        features = model.forward_features(x)
        assert features.shape == (2, tokens, 8)
        expected = features[:, 0] if pool == "token" else features.sum(1) / 49
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)
        torch.testing.assert_close(model(x), model.head(expected))
    assert count(small()) - count(small(pool="mean")) == 8


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("size", [(28, 28), (32, 96)])
def test_gradients_reach_every_parameter(pool, size):
    model = small(pool=pool)
    F.cross_entropy(model(torch.randn(3, 2, *size)), torch.tensor([0, 1, 2])).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_positions_are_resized():
    """A table that is linear in the position stays linear at another size; at its own size it is used as it is."""
    model = small().double()
    ramp = torch.arange(7, dtype=torch.float64) + 0.5
    with torch.no_grad():
        model.pos_embed.copy_(ramp.expand(1, 8, 7, 7))
    assert model._positions((7, 7)) is model.pos_embed
    grown = model._positions((7, 14))[0, 0, 3]
    torch.testing.assert_close(grown[4:10], (torch.arange(14, dtype=torch.float64)[4:10] + 0.5) / 2, rtol=0, atol=1e-12)
    assert model._positions((8, 24)).shape == (1, 8, 8, 24)
    assert create_model("vit_tiny", img_size=32).pos_embed.shape == (1, 26, 8, 8)


def test_positions_matter():
    """Without its table and its class token a transformer of patches does not see their order."""
    model = small(pool="mean").double().eval()
    x = torch.randn(1, 2, 28, 28, dtype=torch.float64)
    swapped = torch.cat((x[..., 4:], x[..., :4]), -1)  # the first column of patches last
    assert (model(x) - model(swapped)).abs().max() > 1e-6
    with torch.no_grad():
        model.pos_embed.zero_()
    torch.testing.assert_close(model(x), model(swapped), rtol=0, atol=1e-12)


def test_classifier_can_be_replaced():
    model = small().double().eval()
    x = torch.randn(2, 2, 28, 28, dtype=torch.float64)
    assert model.get_classifier().out_features == 3
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model(x).dtype == torch.float64 and model.num_classes == 5 and not model.head.training
    model.reset_classifier(0)
    assert model(x).shape == (2, 8) and isinstance(model.get_classifier(), nn.Identity) and model.num_classes == 0


def test_weight_decay_spares_norms_biases_and_embeddings():
    model = small()
    spared = model.no_weight_decay()
    assert {"pos_embed", "cls_token", "norm.weight", "patch_embed.bias", "blocks.0.attn.qkv.bias"} <= spared
    kept = {name for name, _ in model.named_parameters()} - spared
    assert all(name.endswith(".weight") and "norm" not in name for name in kept) and "patch_embed.weight" in kept


def test_regularisers_act_in_training_only():
    x = torch.randn(4, 2, 28, 28)
    plain = small().eval()
    for rate in ("drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = small(**{rate: 0.5})
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model.eval()(x), plain(x))
        assert not torch.allclose(model.train()(x), plain(x))


def test_grad_checkpointing_gives_the_same_gradients():
    def gradients(enable):
        torch.manual_seed(2)
        model = small(drop_path_rate=0.3, drop_rate=0.2).double()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        model(torch.randn(4, 2, 28, 28, dtype=torch.float64)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_sizes_that_the_patches_cover():
    model = small().eval()
    assert model.check_input_size(96) == {"patch_embed": (24, 24)} and model.min_input_size == 4
    assert model.check_input_size(28, 32) == {"patch_embed": (7, 8)}
    assert model(torch.randn(1, 2, 4, 8)).shape == (1, 3)
    for size, message in (
        ((30, 30), "patches of 4 x 4 do not cover images of 30 x 30; nearest sizes: 28 or 32"),
        ((28, 33), "patches of 4 x 4 do not cover images of 28 x 33; nearest sizes: height 28, width 32 or 36"),
    ):
        for check in (model.check_input_size, lambda *size: model(torch.zeros(1, 2, *size))):
            with pytest.raises(ValueError, match=f"^{message}$"):
                check(*size)
    with pytest.raises(ValueError, match="do not cover images of 3 x 3; nearest sizes: 4$"):
        model.check_input_size(3)
    with pytest.raises(ValueError, match="images of 3 x 8 are below the minimum of 4 x 4 of this model"):
        model(torch.zeros(1, 2, 3, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "p4"}, "^a plain ViT is not equivariant: its group is z2, got p4; REViT and G-CNN models take it$"),
        ({"group": "z2m"}, "a plain ViT is not equivariant: its group is z2, got z2m"),
        ({"group": "p7q"}, "unknown group 'p7q'"),
        ({"num_heads": 3}, "num_heads=3 does not divide the 26 channels; choose 1, 2, 13, 26"),
        ({"dims": (8, 16)}, r"a plain ViT has one stage, got dims=\(8, 16\)"),
        ({"depths": 0}, "depths must be whole numbers >= 1, got 0"),
        ({"patch_size": 5}, "patches of 5 x 5 do not cover images of 28 x 28; nearest sizes: 25 or 30"),
        ({"pool": "max"}, "unknown pool 'max'; choose token, mean"),
        ({"mlp_ratio": 0.01}, "mlp_ratio=0.01 leaves no hidden channel of 26; choose at least 0.0384615"),
        ({"num_classes": -1}, "a head needs num_classes >= 0, got -1"),
        ({"drop_rate": 1.0}, r"drop_rate must be in \[0, 1\), got 1.0"),
        ({"attn_drop_rate": -0.1}, r"attn_drop_rate must be in \[0, 1\), got -0.1"),
        ({"filters": "free"}, "model 'vit_tiny': .*unexpected keyword argument 'filters'"),
        ({"features_only": True}, "features_only needs a model on a group; a plain ViT gives its maps by named_features"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_model("vit_tiny", **options)


def test_the_trivial_group_is_taken():
    assert isinstance(create_model("vit_tiny", group="z2"), ViT) and create_model("vit_tiny", group="C1").group.name == "z2"
