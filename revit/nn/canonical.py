r"""Equivariance to the last bit, for any network.

Turning filters changes the order in which a convolution adds up its numbers, so its float32 output is equivariant only up
to rounding. `Canonical` instead turns the input, runs the very same instructions on it, and turns the result back:

    out(x, g) = T_g psi(T_g^-1 x).

Then `out(T_u x)(u g) = T_u out(x)(g)` holds bit for bit, whatever psi is, for groups that move pixels onto pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from revit.actions import act_on_features, act_on_plane
from revit.groups import Group


class Canonical(nn.Module):
    """Makes any module equivariant to the bit (in eval mode, with deterministic kernels), at |G| times its cost.

    The module may take images [B, C, H, W] or feature maps [B, C, G, H, W], and return

    - feature maps [B, C, G, H, W] (its element 0 is used) or maps [B, C, H, W]: the result is [B, C, G, H, W];
    - vectors [B, K], such as logits: the result is their mean over the group, [B, K], invariant to the bit.
    """

    def __init__(self, module: nn.Module, group: Group | str) -> None:
        super().__init__()
        self.group = Group.parse(group)
        if not self.group.is_exact:
            raise ValueError(
                f"{self.group} moves pixels between pixels, so no network is exact under it; choose z2, z2m, p2, p2m, p4 or p4m"
            )
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        act = act_on_features if x.ndim == 5 else act_on_plane
        outputs = []
        for element, inverse in enumerate(self.group.inverse.tolist()):
            out = self.module(act(x, self.group, inverse).contiguous())
            if out.ndim == 5:
                out = out[:, :, 0]
            outputs.append(act_on_plane(out, self.group, element) if out.ndim == 4 else out)
        stacked = torch.stack(outputs, dim=2 if outputs[0].ndim == 4 else 0)
        return stacked if stacked.ndim == 5 else ordered_mean(stacked)

    def extra_repr(self) -> str:
        return str(self.group)


def ordered_mean(x: Tensor) -> Tensor:
    """Mean over the first axis whose rounding does not depend on the order of its entries: sorted, then added in turn."""
    ordered = x.sort(dim=0).values
    total = ordered[0]
    for entry in ordered[1:]:
        total = total + entry
    return total / len(x)
