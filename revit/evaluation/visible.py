"""What of a model can be looked at: its last feature map, the maps that vary most, what goes into its attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.actions import act_on_plane
from revit.equivariance import centred_disc, transform
from revit.evaluation.figures import visible_channels
from revit.evaluation.inference import place_of
from revit.evaluation.stages import kinds_of
from revit.groups import Group

Stages = Mapping[str, Tensor]


def one_image(model: nn.Module, x: Tensor) -> Tensor:
    """The image [1, C, H, W] where the model is."""
    if x.ndim != 4 or len(x) != 1:
        raise ValueError(f"expected one image [1, C, H, W], got shape {list(x.shape)}")
    device, dtype = place_of(model)
    return x.to(device, dtype)


def as_pixels(images: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Normalised images [1, C, H, W] as values 0 to 1, [H, W] or [H, W, 3]; black and white are the extremes of all of them."""
    arrays = [image.float().cpu().numpy() for image in images]
    low, high = min(array.min() for array in arrays), max(array.max() for array in arrays)
    return [visible_channels(np.nan_to_num((array - low) / max(high - low, 1e-12)).clip(0, 1))[0][0] for array in arrays]


@dataclass(frozen=True)
class MapReader:
    """Where the last feature map of a model is found, and as what it is read: [1, C, G, H, W] or [1, C, H, W]."""

    stage: str
    stacked: int = 0  # elements that the channels are split into; 0 leaves them
    pooled: bool = False  # a map on another group than the one that turns the image: its maximum over that group

    def read(self, stages: Stages) -> Tensor:
        value = stages[self.stage].float()
        if self.stacked:
            return value.unflatten(1, (-1, self.stacked))
        return value.amax(2) if self.pooled else value


def find_maps(stages: Mapping[int, Stages], group: Group) -> MapReader | None:
    """The last feature map among the stages of an image turned by some elements, 0 among them; None if there is none.

    It is `pre_class` if there is such a stage, or the last one of more than a pixel. A map [1, C, H, W] whose channels could be
    split into elements is read in the way that turns better with the image.
    """
    names = [name for name, value in stages[0].items() if value.ndim in (4, 5) and min(value.shape[-2:]) > 1]
    names = [name for name in names if all(name in found for found in stages.values())]
    if not names:
        return None
    name = "pre_class" if "pre_class" in names else names[-1]
    kinds = kinds_of(stages[0][name], group)
    if not kinds:
        return MapReader(name, pooled=True)
    if "stacked" not in kinds:
        return MapReader(name)
    readers = (MapReader(name), MapReader(name, stacked=group.order))

    def error(reader: MapReader) -> float:
        upright = reader.read(stages[0])
        maps = {g: (reader.read(found), transform(upright, group, g)) for g, found in stages.items()}
        return sum(float((a - b).abs().mean()) if a.shape == b.shape else float("inf") for a, b in maps.values())

    return min(readers, key=error)


def varying_fields(maps: Tensor, count: int) -> list[int]:
    """The fields of maps [1, C, ...] that vary most over everything else, the most varying first."""
    variance = maps[0].flatten(1).var(1, unbiased=False).nan_to_num()
    return variance.argsort(descending=True, stable=True)[:count].tolist()


def attention_inputs(model: nn.Module, x: Tensor) -> dict[str, tuple[Any, Tensor]]:
    """The layers that have an `attention_map`, in the order of their first calls, each with its input for images x."""
    found: dict[str, tuple[Any, Tensor]] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            found.setdefault(name, (module, inputs[0]))

    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "attention_map")]
    handles = [m.register_forward_pre_hook(lambda m, inputs, name=name: keep(name, m, inputs)) for name, m in layers]
    try:
        if layers:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def unusual_places(image: Tensor, size: tuple[int, int], count: int, *, inside: bool) -> list[tuple[float, float]]:
    """A few places of an image [1, C, H, W] whose colour is far from its median, apart from each other: strokes and nuclei,
    not background. As shares of height and width, at pixel centres of a map of this size; `inside` keeps to the central disc.
    """
    image = image.float().cpu()
    unusual = (image - image.flatten(2).median(2).values[..., None, None]).abs().sum(1, keepdim=True)
    height, width = size
    scores = F.adaptive_avg_pool2d(unusual.nan_to_num(), size)[0, 0]
    if inside:
        scores = scores.masked_fill(~centred_disc(height, width), -1)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    places = []
    for _ in range(min(count, height * width)):
        row, column = divmod(int(scores.argmax()), width)
        places.append(((row + 0.5) / height, (column + 0.5) / width))
        near = (rows - row) ** 2 + (columns - column) ** 2 <= (min(height, width) / 3) ** 2
        scores = torch.where(near, scores - 1e6, scores)  # still to be had where everything is near
        scores[row, column] = -torch.inf
    return places


def pixel_at(place: tuple[float, float], size: tuple[int, int]) -> tuple[int, int]:
    return int(place[0] * size[0]), int(place[1] * size[1])


def turned_pixel(pixel: tuple[int, int], size: tuple[int, int], group: Group, element: int) -> tuple[int, int]:
    """Where an element moves a pixel of a map of this size; the nearest pixel if it moves between pixels."""
    mark = torch.zeros(size)
    mark[pixel] = 1
    moved = act_on_plane(mark, group, element)
    row, column = divmod(int(moved.argmax()), moved.shape[1])
    return row, column


def few_elements(group: Group) -> list[int]:
    """At most five elements that show what a group does: the identity, the smallest turn, 90°, 180° and a mirror."""
    if group.order <= 5:
        return list(range(group.order))
    n = group.rotations
    chosen = [0, 1, n // 4, n // 2, *((n, n + 1) if group.reflections else ())]
    return list(dict.fromkeys(chosen))[:5]


def one_element(group: Group) -> int:
    """90° if the group has it, or the first element that moves pixels onto pixels, or any; the identity only if alone."""
    if group.rotations % 4 == 0:
        return group.rotations // 4
    others = range(1, group.order)
    return next((g for g in others if group.is_exact_element(g)), min(1, group.order - 1))
