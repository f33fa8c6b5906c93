r"""Up-sampling that is exact at every size, and the step of a decoder that joins a coarse map with a finer one.

A symmetric layer that halves a map of odd size loses the size: 15 comes from 29 as from 30. So a map is not doubled but
brought to the size of the map that it is joined with. Bilinear sampling at `(i + 1/2) h / H - 1/2`, i = 0 ... H - 1, looks at
points that lie symmetrically about the centre for all h and H, with the same weights on both sides: turning and mirroring
commute with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.groups import Group
from revit.nn.convolution import GroupConv, GroupLinear
from revit.nn.normalization import make_norm


def upsample_to(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[..., h, w] -> [..., H, W] by bilinear interpolation, symmetric for all sizes; the element axis is not touched."""
    maps = x.flatten(1, -3) if x.ndim > 4 else x
    out = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return out.unflatten(1, x.shape[1:-2]) if x.ndim > 4 else out


class UpsampleJoin(nn.Module):
    r"""One step of a decoder: `out = relu(norm(conv([up(W x), skip])))`, with W a 1x1 and conv a 3x3 group convolution.

    x [B, C_in, G, h, w] and skip [B, C_skip, G, H, W] -> [B, C_out, G, H, W]. Exact at every size.
    """

    def __init__(
        self, group: Group | str, in_channels: int, skip_channels: int, out_channels: int, *, norm: str = "batch",
        filters: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.reduce = GroupLinear(group, in_channels, out_channels)
        conv = GroupConv(group, out_channels + skip_channels, out_channels, 3, padding=1, bias=False, filters=filters)
        self.conv = nn.Sequential(conv, make_norm(norm, out_channels), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        up = upsample_to(self.reduce(x), (skip.shape[-2], skip.shape[-1]))
        out: Tensor = self.conv(torch.cat((up, skip), dim=1))  # [B, C_out + C_skip, G, H, W] -> [B, C_out, G, H, W]
        return out
