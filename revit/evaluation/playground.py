"""Turning one image by hand: what a model answers, how far that is from what it said of the upright image, and its features.

Everything that the page of `revit demo` shows is made here, as plain values and as pieces of HTML that load nothing.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revit.actions import act_on_plane
from revit.data.file_images import Fit
from revit.data.image_files import ImageSource, image_header
from revit.data.loader import normalised, scaled
from revit.data.spec import DataSpec, Pixels
from revit.evaluation.audit_figures import short_number
from revit.evaluation.drawing import one_line
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.stages import OUTPUT, read_stages
from revit.evaluation.turning import Fill, normalised_black, turn_by_angle
from revit.evaluation.visible import as_pixels, find_maps, one_image, varying_fields
from revit.groups import Group

FIELDS, TILE, GAP = 4, 112, 6  # feature maps that are shown, and their side and distance in pixels
LEAST_SIDE = 7  # of a map in which one still sees the image, if the model has such maps
BARS = 4
Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Player:
    """A model on the page, and what it knows of its images. A model without symmetry has the group z2."""

    label: str
    model: nn.Module
    spec: DataSpec
    group: Group

    def __post_init__(self) -> None:
        logits = self.spec.num_classes
        with evaluating(self.model):
            device, dtype = place_of(self.model)
            shape = self.model(torch.zeros(1, self.spec.channels, *self.spec.size, device=device, dtype=dtype)).shape
        if len(shape) not in (2, 4) or shape[1] != logits:
            raise ValueError(f"{self.label}: {self.spec.name} has {logits} classes, the model returns shape {list(shape)}")


@dataclass(frozen=True)
class Answer:
    """What a model says of a turned image, beside what it says of the upright one."""

    image: Picture  # [H, W, 3]: the image as the model sees it
    bars: tuple[tuple[str, float], ...]  # the likeliest classes with their probabilities; of masks, their shares of the image
    upright: str  # the class of the upright image
    change: float  # the largest difference of a logit, over the largest logit of the upright image
    features: Picture | None  # two rows [H, W, 3]: features of the turned image, and the turned features of the upright one

    @property
    def prediction(self) -> str:
        """One line: the likeliest class, with its probability in percent."""
        name, probability = self.bars[0]
        return f"{name}, {100 * probability:.1f} %"

    @property
    def stays(self) -> bool:
        return self.bars[0][0] == self.upright


def read_picture(source: ImageSource, spec: DataSpec) -> Tensor:
    """An image file of anyone as a model takes it: normalised, [1, C, H, W]. Raises `BadImage` with one line that says why."""
    fit = Fit(spec.channels, spec.size, image_header(source).floating, spec.centre)
    return _prepared(fit.read(source), spec)


def fit_picture(pixels: Pixels, spec: DataSpec) -> Tensor:
    """Pixels [C, H, W] of any dataset as a model takes them."""
    fit = Fit(spec.channels, spec.size, pixels.dtype != np.uint8, spec.centre)
    return _prepared(fit.apply(pixels, "this image"), spec)


def turn_picture(x: Tensor, degrees: float, mirrored: bool, fill: Fill = 0.0) -> Tensor:
    """Images [B, C, H, W], first mirrored left to right or not, then turned counter-clockwise, as `revit audit` turns them."""
    return turn_by_angle(act_on_plane(x, "z2m", int(mirrored)), degrees, fill)


def promise(group: Group, degrees: float, mirrored: bool) -> str:
    """What a model on a group owes us for this turn, in one line."""
    if group.order == 1:
        return "no symmetry: it owes nothing"
    if degrees % 360 == 0 and not mirrored:
        return "the image as it is"
    step = " and ".join(["a mirror"] * mirrored + [f"a turn by {degrees:g}°"] * (degrees % 360 != 0))
    if degrees * group.rotations % 360 or (mirrored and not group.reflections):
        return f"{step} is not in {group}: it owes nothing"
    if degrees % 90:
        return f"{step} is in {group}, pixels fall between pixels: the answer should stay, nearly"
    return f"{step} is in {group}, pixels move onto pixels: the answer must stay"


def ask(player: Player, x: Tensor, degrees: float, mirrored: bool) -> Answer:
    """What a model says of an image [1, C, H, W] after a turn."""
    fill = normalised_black(player.spec)
    with evaluating(player.model):
        upright = one_image(player.model, x)
        turned = turn_picture(upright, degrees, mirrored, fill)
        before, after = read_stages(player.model, upright), read_stages(player.model, turned)
    logits, moved = before[OUTPUT].double().cpu(), after[OUTPUT].double().cpu()
    shares = _shares(moved)
    order = shares.argsort(descending=True, stable=True)[:BARS].tolist()
    classes = player.spec.classes
    expected = turn_picture(logits, degrees, mirrored) if logits.ndim == 4 else logits
    scale = max(float(logits.abs().max()), 1e-30)
    return Answer(
        image=_bytes(_in_colour(as_pixels([upright, turned])[1])),
        bars=tuple((one_line(classes[i], 40), float(shares[i])) for i in order),
        upright=one_line(classes[int(_shares(logits).argmax())], 40),
        change=float((moved - expected).abs().max()) / scale if moved.shape == expected.shape else math.inf,
        features=_features(before, after, player.group, degrees, mirrored),
    )


def answer_html(player: Player, answer: Answer, degrees: float, mirrored: bool, *, role: str) -> str:
    """One model's column of the page. `role` is the class of the element, by which tests and styles find it."""
    verdict = "stays" if answer.stays else f"changed, upright it was {answer.upright}"
    bars = "".join(
        f'<div class="bar"><span>{_text(name)}</span><meter value="{share:.4f}"></meter><span>{100 * share:.1f} %</span></div>'
        for name, share in answer.bars
    )
    features = "<p>This model shows no feature maps.</p>"
    if answer.features is not None:
        note = "features of the turned image (above) and turned features of the upright image (below): the same?"
        features = f"<figure>{_img(answer.features, 'feature maps')}<figcaption>{note}</figcaption></figure>"
    return (
        f'<section class="{role}"><h3>{_text(player.label)}</h3>'
        f'<p class="prediction">{_text(answer.prediction)}</p>'
        f'<p class="verdict {"same" if answer.stays else "other"}">{_text(verdict)}</p>'
        f'<p class="change">largest change of a logit: {_text(short_number(answer.change))} of the largest one</p>'
        f'<p class="promise">{_text(promise(player.group, degrees, mirrored))}</p>{bars}{features}</section>'
    )


def page_html(players: Sequence[Player], x: Sequence[Tensor], degrees: float, mirrored: bool) -> str:
    """The turned image, then a column for each model; the first is the one of ours. `x` is the image as each model takes it."""
    answers = [ask(player, image, degrees, mirrored) for player, image in zip(players, x, strict=True)]
    columns = "".join(
        answer_html(player, answer, degrees, mirrored, role="ours" if i == 0 else "plain")
        for i, (player, answer) in enumerate(zip(players, answers, strict=True))
    )
    caption = f"<figcaption>turned by {degrees:g}°{', mirrored first' if mirrored else ''}</figcaption>"
    return f'<div class="turned"><figure>{_img(answers[0].image, "the turned image")}{caption}</figure>{columns}</div>'


def message_html(message: object) -> str:
    """What is wrong, in one line, for the place where the answers would be."""
    return f'<p class="message" role="alert">{_text(one_line(message, 300))}</p>'


def _prepared(pixels: Pixels, spec: DataSpec) -> Tensor:
    return normalised(scaled(torch.tensor(pixels), torch.device("cpu"), torch.float32), spec)[None]


def _shares(logits: Tensor) -> Tensor:
    """Probabilities [K] of logits [1, K]; of a map of classes the share of the image that each has."""
    return logits[0].softmax(0).flatten(1).mean(1) if logits.ndim == 4 else logits[0].softmax(0)


def _features(
    before: dict[str, Tensor], after: dict[str, Tensor], group: Group, degrees: float, mirrored: bool
) -> Picture | None:
    """Some maps (the largest of the group's elements at each pixel): found above, expected below. None if there are none."""
    large = {name: value for name, value in before.items() if value.ndim >= 4 and min(value.shape[-2:]) >= LEAST_SIDE}
    reader = find_maps({0: large or before}, group)
    if reader is None or reader.stage not in after:
        return None
    upright, found = ((maps.amax(2) if maps.ndim == 5 else maps).cpu() for maps in map(reader.read, (before, after)))
    fields = varying_fields(upright, FIELDS)
    upright, found = upright[:, fields], found[:, fields]
    # Outside of the image a map is unknown: its least value there, which the colours show as dark.
    expected = turn_picture(upright, degrees, mirrored, upright.amin((0, 2, 3)).tolist())
    if found.shape != expected.shape:
        return None
    low, high = upright.amin((0, 2, 3))[:, None, None], upright.amax((0, 2, 3))[:, None, None]
    rows = [_row(((maps[0] - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).numpy()) for maps in (found, expected)]
    return np.concatenate((rows[0], np.full((GAP, *rows[0].shape[1:]), 255, np.uint8), rows[1]))


def _row(planes: NDArray[np.float32]) -> Picture:
    """Maps [N, H, W] between 0 and 1, in colours, enlarged to whole pixels, side by side."""
    import matplotlib

    tiles: list[Picture] = []
    times = max(1, TILE // max(planes.shape[1:]))
    for plane in planes:
        tile = _bytes(matplotlib.colormaps["viridis"](plane)[..., :3]).repeat(times, 0).repeat(times, 1)
        tiles += [tile, np.full((tile.shape[0], GAP, 3), 255, np.uint8)]
    return np.concatenate(tiles[:-1], axis=1)


def _in_colour(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    return pixels if pixels.ndim == 3 else np.stack([pixels] * 3, axis=-1)


def _bytes(values: NDArray[np.float32]) -> Picture:
    return (255 * values).round().astype(np.uint8)


def _img(picture: Picture, alt: str) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f'<img alt="{_text(alt)}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _text(text: str) -> str:
    return html.escape(text, quote=True)
