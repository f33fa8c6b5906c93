"""Your own network from our layers: a plain CNN beside one on a group, both audited, the second one shipped as plain layers.

    python examples/own_network.py --group p4m

The two are of one kind. The plain one changes its answers when the image is turned; the one whose convolutions live on the
group does not, with any weights, and stays so after `revit.deploy` has made ordinary convolutions of it.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revit
from revit import Group, equivariance_error, prediction_consistency
from revit.nn import GroupConv, GroupPool, InvariantHead, LiftingConv, make_norm


def plain_network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16 * 16, classes),
    )  # fmt: skip


class OwnNetwork(nn.Module):
    """The same with the group as an axis: images [B, 3, H, W] -> features [B, 16, G, H/2, W/2] -> logits [B, classes]."""

    def __init__(self, group: Group, classes: int) -> None:
        super().__init__()
        self.lift = LiftingConv(group, 3, 8, 4, stride=2, padding=1)  # an even kernel: exact at even sizes
        self.norm1, self.conv, self.norm2 = make_norm("batch", 8), GroupConv(group, 8, 16, 3, padding=1), make_norm("batch", 16)
        self.head = InvariantHead(16, classes, hidden=32)

    def forward_features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.lift(x)))
        return torch.relu(self.norm2(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def print_audit(name: str, model: nn.Module, x: Tensor, group: Group) -> None:
    error = equivariance_error(model, x, group, relative=True).max().item()
    same = prediction_consistency(model, x, group).mean().item()
    print(f"  {name:<28} largest relative change {error:.1e}   same prediction {same:.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="p4m", help="group of the network: z2m, p4, p4m, ... (default: p4m)")
    parser.add_argument("--images", type=int, default=32, help="images to ask about")
    arguments = parser.parse_args()
    try:
        group = Group.parse(arguments.group)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    x = F.interpolate(torch.randn(arguments.images, 3, 8, 8), size=32, mode="bilinear")  # patches of colour
    own = OwnNetwork(group, 10).eval()
    with torch.no_grad():
        print(f"logits of untrained networks under the {group.order} elements of {group}, {len(x)} images:")
        print_audit("plain CNN", plain_network(10).eval(), x, group)
        print_audit("ours", own, x, group)
        print_audit("ours, deployed", revit.deploy(own), x, group)
        features = own.forward_features(x)
        print(f"features {list(features.shape)}, invariant maps {list(GroupPool('max')(features).shape)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
