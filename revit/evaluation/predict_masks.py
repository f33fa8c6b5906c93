"""Masks for image files: a class for each pixel, as PNG files beside a table."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.actions import act_on_plane
from revit.data.cache import whole_file
from revit.data.image_files import image_header, printable
from revit.data.loader import normalised
from revit.data.resize import resize_mask, seen_box
from revit.data.spec import IGNORED, DataError, DataSpec
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.partial_files import growing_csv
from revit.evaluation.predict import Skipping, Written, check_answers, read_batches
from revit.evaluation.turning import normalised_black, turn_by_element
from revit.groups import Group


def write_masks(
    model: nn.Module,
    spec: DataSpec,
    paths: Iterable[Path],
    out: Path,
    *,
    agreement: Group | str | None = None,
    on_bad: str = "stop",
    batch_size: int = 32,
    workers: int = 2,
) -> Written:
    """Writes a mask for each file into `<out>_masks/`, and a CSV table, a row per file: path, mask, the share of the pixels
    that each class has (`share_<class>`), and with `agreement` the share of pixels that keep their class when the image turns.

    Masks are 8-bit grey PNG files of class indices in the size of the image; 255 where the model did not look: it sees the
    centre of images of other proportions than its own. The table grows as that of `write_predictions` does.
    """
    if on_bad not in ("stop", "skip"):
        raise DataError(f"on_bad must be stop or skip, got {on_bad!r}")
    group = Group.parse(agreement) if agreement is not None else None
    out = Path(out)
    folder = out.with_name(f"{out.stem}_masks")
    header = ["path", "mask", *(f"share_{name}" for name in spec.classes), *(["agreement"] if group is not None else [])]
    device, dtype = place_of(model)
    used: set[str] = set()
    rows = 0
    with ExitStack() as stack:
        add_row = stack.enter_context(growing_csv(out, header))
        skip = Skipping(out.with_name(f"{out.name}.skipped.csv"), stack)
        handler = skip if on_bad == "skip" else None
        for names, images in read_batches(paths, spec, dtype, handler, batch_size, workers):
            x = normalised(images.to(device), spec)
            with evaluating(model):
                logits = model(x)
                check_answers(logits, (len(x), spec.num_classes, *x.shape[-2:]), spec, names)
                classes = logits.argmax(1)
                same = _agreement(model, spec, x, classes, group) if group is not None else None
            for i, path in enumerate(names):
                mask = folder / _free_name(path.stem, used)
                _write_mask(mask, framed(classes[i].to(torch.uint8).cpu().numpy(), path))
                shares = torch.bincount(classes[i].flatten(), minlength=spec.num_classes) / classes[i].numel()
                numbers = [*shares.tolist(), *([] if same is None else [same[i].item()])]
                add_row([str(path), str(mask), *(f"{number:.6g}" for number in numbers)])
            rows += len(names)
    return skip.written(rows)


def framed(mask: NDArray[np.uint8], path: Path) -> NDArray[np.uint8]:
    """A mask in the frame of the image file that it was made from: resized back, 255 where the model did not look."""
    header = image_header(path)
    size = (mask.shape[0], mask.shape[1])
    top, left, tall, wide = seen_box(header.height, header.width, size)
    frame = np.full((header.height, header.width), IGNORED, dtype=np.uint8)
    frame[top : top + tall, left : left + wide] = resize_mask(mask, (tall, wide))
    return frame


def _agreement(model: nn.Module, spec: DataSpec, x: Tensor, classes: Tensor, group: Group) -> Tensor:
    """The share of pixels, over the elements and the identity, whose class turns with the image, [B]."""
    black, same = normalised_black(spec), torch.ones(len(x))
    for element in range(1, group.order):
        expected = act_on_plane(classes[:, None].to(x.dtype), group, element, interpolation="nearest")[:, 0]
        found = model(turn_by_element(x, group, element, black)).argmax(1)
        same += (found == expected).double().mean((1, 2)).float().cpu()
    return same / group.order


def _free_name(stem: str, used: set[str]) -> str:
    """A name for the mask of an image that no other image of this table has."""
    name, count = f"{stem}.png", 1
    while name in used:
        count += 1
        name = f"{stem}-{count}.png"
    used.add(name)
    return name


def _write_mask(path: Path, mask: NDArray[np.uint8]) -> None:
    from PIL import Image

    if path.is_dir():
        raise DataError(f"{printable(path)}: a folder in the place of a mask; remove it or choose another --out")
    with whole_file(path) as file:
        Image.fromarray(mask).save(file, "PNG")
