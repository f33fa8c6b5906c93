"""Features that turn with the input: lift a real digit, audit an untrained model, save a picture.

    python examples/turning_features.py --group p4m --out demo

Takes a handwritten digit of the embedded data, turns and mirrors it by every element of the group, prints how far the
features and the logits of an untrained model are from turning along (they are not), and draws the lifted maps.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import revit
from revit import Group, act_on_plane, equivariance_error, prediction_consistency
from revit.data import DataOptions, open_dataset

STAGES = ("lift", "pre_class", "logits")


def embedded_digits(count: int) -> Tensor:
    """Real handwritten digits [count, 1, 28, 28] in [0, 1], turned by any angle; they ship with the installation."""
    images = open_dataset(DataOptions(name="rotmnist5k")).test
    return torch.from_numpy(np.stack([images.read(i) for i in range(count)])).float() / 255


def print_audit(models: dict[str, Any], digits: Tensor, group: Group) -> None:
    print(f"Relative equivariance error of untrained models under the elements of {group} ({len(digits)} real digits):")
    print(f"  {'model':<22}" + "".join(f"{stage:>14}" for stage in STAGES) + f"{'same prediction':>18}")
    for name, model in models.items():
        errors = [equivariance_error(model, digits, group, feature=s, relative=True)[1:].max().item() for s in STAGES]
        same = 100 * prediction_consistency(model, digits, group)[1:].mean().item()
        print(f"  {name:<22}" + "".join(f"{error:>14.1e}" for error in errors) + f"{same:>16.2f} %")


def draw(model: Any, digit: Tensor, group: Group, path: Path) -> None:
    """The digit turned by some elements (rows) and one field of its lifted maps, element by element (columns)."""
    elements = list(range(min(group.order, 4))) + ([group.rotations] if group.reflections else [])
    maps = {g: model.named_features(act_on_plane(digit, group, g))["lift"][0] for g in elements}
    field = int(maps[0].amax(dim=(1, 2, 3)).argmax())
    columns = 1 + group.order
    figure, axes = plt.subplots(len(elements), columns, figsize=(1.15 * columns, 1.3 * len(elements) + 0.5), squeeze=False)
    for row, g in zip(axes, elements, strict=True):
        row[0].imshow(act_on_plane(digit, group, g)[0, 0], cmap="gray")
        row[0].set_ylabel(group.element_name(g), fontsize=8)
        for h, axis in enumerate(row[1:]):
            axis.imshow(maps[g][field, h], cmap="viridis", vmin=0, vmax=float(maps[0][field].max()))
            if g == 0:
                axis.set_title(f"element {h}\n{group.element_name(h)}", fontsize=7)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0][0].set_title("input", fontsize=7)
    figure.suptitle(f"One lifted field of a digit on {group}: the maps turn with the input and trade places", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="p4m", help="group of the model: z2, z2m, p4, p4m, p8, ... (default: p4m)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    options = parser.parse_args()
    try:
        group = Group.parse(options.group)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    digits = embedded_digits(20)
    settings: dict[str, Any] = {"group": group, "in_chans": 1, "num_classes": 10, "strict": False}
    models: dict[str, Any] = {
        "revit_small": revit.create_model("revit_small", **settings).eval(),
        "revit_small_paper": revit.create_model("revit_small_paper", **settings).eval(),
    }
    path = options.out / "turning_features.png"
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the paper's stride is not exact at 28 pixels: the table says so
            print_audit(models, digits, group)
        draw(models["revit_small"], digits[14:15], group, path)
    print(f"Our layers are exact at 28 pixels; the released code's odd strided kernel is not. Picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
