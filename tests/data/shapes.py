"""Pictures with a mask each, made here: bright discs and dark squares on noise."""

import numpy as np
from PIL import Image


def shapes(count, side=64, seed=0):
    """Images and masks [N, H, W]: 0 is the background, 1 a disc, 2 a square, 255 a few pixels that nobody has labelled."""
    generator = np.random.Generator(np.random.PCG64(seed))
    y, x = np.mgrid[:side, :side]
    images = generator.normal(110, 25, (count, side, side))
    masks = np.zeros((count, side, side), np.uint8)
    for image, mask in zip(images, masks, strict=True):
        for k, change in ((1, 70), (2, -70)):
            radius = generator.integers(side // 10, side // 5)
            row, column = generator.integers(radius, side - radius, 2)
            disc = (y - row) ** 2 + (x - column) ** 2 <= radius**2
            square = np.maximum(abs(y - row), abs(x - column)) <= radius
            inside = (disc if k == 1 else square) & (mask == 0)
            image[inside] += change
            mask[inside] = k
        mask[:2, :2] = 255
    return images.clip(0, 255).astype(np.uint8), masks


def shape_folder(root, count=12, side=16, seed=0, parts=("",)):
    """`images/` and `masks/`, below each part if there are some."""
    for k, part in enumerate(parts):
        for name in ("images", "masks"):
            (root / part / name).mkdir(parents=True)
        for i, (image, mask) in enumerate(zip(*shapes(count, side, seed + k), strict=True)):
            Image.fromarray(image).save(root / part / "images" / f"{i}.png")
            Image.fromarray(mask).save(root / part / "masks" / f"{i}.png")
    return root
