"""Masks that turn with the image: make a small folder of images and masks, train on it, turn a picture, compare.

    python examples/segmentation.py --group p4 --epochs 4 --out demo_masks

Bright discs and dark squares on noise are written to `OUT/data/images` and `OUT/data/masks`, as you would lay out your own. A
small model learns to tell the pixels apart. Then a picture is turned by every element of the group: the mask of the turned
picture is the turned mask, before training and after it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import revit
from revit import Group, act_on_plane
from revit.data import DataOptions, Dataset, open_dataset
from revit.data.augment import AugmentOptions
from revit.data.loader import EvalLoader, TrainLoader
from revit.data.spec import IGNORED
from revit.evaluation.segmentation import collect_masks, score_masks

CPU = torch.device("cpu")


def write_shapes(root: Path, count: int, side: int = 64) -> None:
    """Pictures with masks of the same names: 0 is the background, 1 a disc, 2 a square."""
    generator = np.random.Generator(np.random.PCG64(0))
    y, x = np.mgrid[:side, :side]
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        image, mask = generator.normal(110, 25, (side, side)), np.zeros((side, side), np.uint8)
        for label, change in ((1, 70), (2, -70)):
            radius = generator.integers(side // 10, side // 5)
            row, column = generator.integers(radius, side - radius, 2)
            disc = (y - row) ** 2 + (x - column) ** 2 <= radius**2
            square = np.maximum(abs(y - row), abs(x - column)) <= radius
            inside = (disc if label == 1 else square) & (mask == 0)
            image[inside] += change
            mask[inside] = label
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(root / "images" / f"{i}.png")
        Image.fromarray(mask).save(root / "masks" / f"{i}.png")
    (root / "classes.txt").write_text("background\ndisc\nsquare\n")


def train(model: nn.Module, dataset: Dataset, epochs: int) -> None:
    loader = TrainLoader(dataset.train, dataset.spec, batch_size=4, augment=AugmentOptions(rotate=180, fill="reflection"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        model.train()
        for (batch,) in loader.batches(epoch):
            images, masks = loader.prepare(batch, epoch, CPU, torch.float32)  # turned alike
            loss = F.cross_entropy(model(images), masks, ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scores = score_masks(
            collect_masks(model, EvalLoader(dataset.val, dataset.spec, batch_size=8), CPU), dataset.spec.classes
        )
        print(f"epoch {epoch + 1}: validation mean IoU {scores.mean_iou:.1%}, pixel accuracy {scores.accuracy:.1%}")


def print_turns(model: nn.Module, dataset: Dataset, group: Group) -> None:
    loader = EvalLoader(dataset.test, dataset.spec, batch_size=1)
    x = loader.prepare(next(iter(loader)), CPU, torch.float64)
    model = model.double().eval()
    with torch.no_grad():
        upright = model(x)
        for g in range(group.order):
            expected, found = act_on_plane(upright, group, g), model(act_on_plane(x, group, g).contiguous())
            error = (found - expected).abs().max() / expected.abs().max()
            same = (found.argmax(1) == expected.argmax(1)).double().mean()
            print(f"  {group.element_name(g):<22} largest difference {error:.1e}   same class at {same:.2%} of the pixels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="p4", help="group of the model: z2m, p4, p4m, ...")
    parser.add_argument("--images", type=int, default=48, help="pictures to make")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("demo_masks"), help="folder to write")
    arguments = parser.parse_args()
    try:
        group = Group.parse(arguments.group)
        write_shapes(arguments.out / "data", arguments.images)
        dataset = open_dataset(DataOptions(name="masks", root=str(arguments.out / "data")))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    model = revit.create_model(
        "revit_seg_tiny", group=group, in_chans=1, num_classes=3, dims=(8, 16), depths=(1, 1), num_heads=(1, 1), kernel_size=3
    )
    train(model, dataset, arguments.epochs)
    print(f"the mask of a turned picture against the turned mask, under {group}:")
    print_turns(model, dataset, group)
    print(f"the same with a run folder:  revit train segmentation --data-root {arguments.out / 'data'} --out runs/shapes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
