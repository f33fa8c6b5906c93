"""Models as backbones: their maps feed an ordinary feature pyramid, and pooled over the group they turn as images do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revit.actions import act_on_plane
from revit.models import create_model
from revit.nn import upsample_to

SMALL = {"dims": (4, 6, 8), "depths": (1, 1, 1), "num_heads": (1, 1, 2), "in_chans": 1}


class FPN(nn.Module):
    """A feature pyramid (Lin et al. 2017): 1x1 laterals, the coarser map added to the finer one, a smoothing of each."""

    def __init__(self, channels, width, kernel_size):
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(count, width, 1) for count in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, kernel_size, padding=kernel_size // 2) for _ in channels)

    def forward(self, maps):
        found = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        for i in reversed(range(len(found) - 1)):
            found[i] = found[i] + upsample_to(found[i + 1], found[i].shape[-2:])
        return [smooth(x) for smooth, x in zip(self.smooth, found, strict=True)]


@pytest.mark.parametrize("pool", [None, "group"])
def test_maps_feed_an_ordinary_pyramid(pool):
    """By the channels and reductions that the backbone states; a training step reaches its first layer."""
    backbone = create_model("revit_hier_tiny", group="p4", features_only=True, pool=pool, **SMALL)
    fields = [4, 6, 8]
    assert backbone.channels() == (fields if pool else [4 * c for c in fields]) and backbone.reduction() == [4, 8, 16]
    pyramid = FPN(backbone.channels(), 5, 3)
    x = torch.randn(2, 1, 32, 48)
    out = pyramid(backbone(x))
    sizes = [(32 // r, 48 // r) for r in backbone.reduction()]
    assert [y.shape for y in out] == [(2, 5, *size) for size in sizes]
    sum(y.square().mean() for y in out).backward()
    gradient = next(backbone.parameters()).grad
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("size", [(32, 32), (29, 35)])
def test_pooled_maps_turn_as_images_do(size):
    """Then a pyramid of 1x1 layers keeps the symmetry, which it cannot on stacked maps: there elements trade channels."""
    worst = {}
    for pool in (None, "group"):
        torch.manual_seed(0)
        backbone = create_model("revit_hier_tiny", group="p4m", features_only=True, pool=pool, **SMALL).double().eval()
        pyramid = FPN(backbone.channels(), 5, 1).double()
        x = torch.randn(1, 1, *size, dtype=torch.float64)
        with torch.no_grad():
            upright = pyramid(backbone(x))
            errors = []
            for g in range(8):
                turned = pyramid(backbone(act_on_plane(x, "p4m", g).contiguous()))
                for y, z in zip(turned, upright, strict=True):
                    expected = act_on_plane(z, "p4m", g)
                    errors.append(((y - expected).abs().max() / expected.abs().max()).item())
        worst[pool] = max(errors)
    assert worst["group"] <= 1e-10 and worst[None] > 1e-2


def test_pooled_maps_are_the_largest_of_the_elements():
    whole, pooled = (create_model("revit_tiny", features_only=True, in_chans=1, pool=pool) for pool in (None, "group"))
    pooled.load_state_dict(whole.state_dict())
    x = torch.randn(2, 1, 16, 16)
    for stacked, found in zip(whole.eval()(x), pooled.eval()(x), strict=True):
        assert torch.equal(found, stacked.unflatten(1, (-1, 4)).amax(2))
    assert [info["num_chs"] for info in pooled.feature_info] == [16, 16, 16]


def test_wrong_pools_are_named():
    with pytest.raises(ValueError, match=r"pool must be None .* or 'group' .*, got 'mean'"):
        create_model("revit_tiny", features_only=True, pool="mean")
    with pytest.raises(ValueError, match="pool"):
        create_model("revit_tiny", pool="group")
    assert F.softmax(create_model("vit_tiny", pool="mean", in_chans=1)(torch.randn(1, 1, 28, 28)), 1).shape == (1, 10)
