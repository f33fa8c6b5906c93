"""Predictions for image files, in memory that does not grow with their number.

Files are read ahead by a few threads while the model works, batch after batch; each batch is written before the next one. What
a model needs to know of the data is in its `DataSpec`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revit.data.file_images import Fit
from revit.data.image_files import image_header, printable
from revit.data.loader import normalised, scaled
from revit.data.spec import BadImage, DataError, DataSpec
from revit.evaluation.inference import evaluating, place_of
from revit.evaluation.partial_files import growing_csv, growing_npy
from revit.evaluation.turning import normalised_black, turn_by_element
from revit.groups import Group


@dataclass(frozen=True)
class Predictions:
    """What a model says about one batch of files, on the CPU."""

    paths: tuple[Path, ...]
    probabilities: Tensor  # [B, K]
    agreement: Tensor | None = None  # [B]: share of group elements, the identity among them, that leave the class as it is
    embeddings: Tensor | None = None  # [B, C]: the invariant features


@dataclass(frozen=True)
class Written:
    """What `write_predictions` did: rows in the table, and files that could not be read, listed in `skipped_list`."""

    rows: int
    skipped: int
    skipped_list: Path | None


def predict_files(
    model: nn.Module,
    spec: DataSpec,
    paths: Iterable[Path],
    *,
    embeddings: bool = False,
    agreement: Group | str | None = None,
    on_bad: Callable[[Path, BadImage], object] | None = None,
    batch_size: int = 32,
    workers: int = 2,
) -> Iterator[Predictions]:
    """Predictions batch by batch, in the order of the paths; memory holds a few batches, however many paths there are.

    - `embeddings` adds the invariant features, `agreement` names the group whose elements turn each image.
    - `on_bad` is called with each file that cannot be read, and the rest goes on; without it `BadImage` is raised.
    - `workers` is the number of threads that read ahead, at most two batches.
    """
    if embeddings and not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise ValueError(f"embeddings need a model with forward_features and forward_head, got {type(model).__name__}")
    if batch_size < 1 or workers < 1:
        raise ValueError(f"batch_size and workers must be at least 1, got {batch_size} and {workers}")
    group = Group.parse(agreement) if agreement is not None else None
    return _predict(model, spec, paths, embeddings, group, on_bad, batch_size, workers)


def write_predictions(
    model: nn.Module,
    spec: DataSpec,
    paths: Iterable[Path],
    out: Path,
    *,
    embeddings: Path | None = None,
    agreement: Group | str | None = None,
    on_bad: str = "stop",
    batch_size: int = 32,
    workers: int = 2,
    digits: int = 6,
) -> Written:
    """Writes a CSV table, a row per file: path, label, confidence, `prob_<class>` for each class, and agreement if asked for.

    The table grows as `<out>.partial` and takes its name when it is complete; an older one is kept until then. `embeddings`
    names a .npy file [N, C] whose rows are those of the table. With `on_bad="skip"` files that cannot be read are listed with
    the reason in `<out>.skipped.csv`; with "stop" the first one raises `BadImage`. Numbers have so many `digits`: nine tell all
    float32 numbers apart.
    """
    if on_bad not in ("stop", "skip"):
        raise DataError(f"on_bad must be stop or skip, got {on_bad!r}")
    out = Path(out)
    if embeddings is not None and os.path.abspath(embeddings) == os.path.abspath(out):
        raise DataError(f"{printable(out)}: the table and the embeddings need different names")
    skipped_list = out.with_name(f"{out.name}.skipped.csv")
    header = ["path", "label", "confidence", *(f"prob_{name}" for name in spec.classes)]
    rows = 0
    with ExitStack() as stack:
        add_row = stack.enter_context(growing_csv(out, header + ["agreement"] * (agreement is not None)))
        add_embeddings = stack.enter_context(growing_npy(Path(embeddings))) if embeddings is not None else None
        skip = Skipping(skipped_list, stack)
        batches = predict_files(
            model, spec, paths, embeddings=embeddings is not None, agreement=agreement,
            on_bad=skip if on_bad == "skip" else None, batch_size=batch_size, workers=workers,
        )  # fmt: skip
        for batch in batches:
            for row in _table_rows(batch, spec, digits):
                add_row(row)
            if add_embeddings is not None and batch.embeddings is not None:
                add_embeddings(batch.embeddings)
            rows += len(batch.paths)
    return skip.written(rows)


class Skipping:
    """Called with each file that cannot be read, it lists them with the reasons; a list without one is not made."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self.stack, self.count = path, stack, 0
        self.add: Callable[[Sequence[str]], object] | None = None

    def __call__(self, path: Path, error: BadImage) -> None:
        if self.add is None:
            self.add = self.stack.enter_context(growing_csv(self.path, ["path", "reason"]))
        self.add([str(path), str(error).removeprefix(f"{printable(path)}: ")])
        self.count += 1

    def written(self, rows: int) -> Written:
        """What became of all files, when the table is complete."""
        if not self.count:
            self.path.unlink(missing_ok=True)  # of an older table
        return Written(rows, self.count, self.path if self.count else None)


def _predict(
    model: nn.Module,
    spec: DataSpec,
    paths: Iterable[Path],
    embeddings: bool,
    group: Group | None,
    on_bad: Callable[[Path, BadImage], object] | None,
    batch_size: int,
    workers: int,
) -> Iterator[Predictions]:
    device, dtype = place_of(model)
    for names, images in read_batches(paths, spec, dtype, on_bad, batch_size, workers):
        yield _predict_batch(model, spec, names, images.to(device), embeddings, group)


def read_batches(
    paths: Iterable[Path],
    spec: DataSpec,
    dtype: torch.dtype,
    on_bad: Callable[[Path, BadImage], object] | None,
    batch_size: int,
    workers: int,
) -> Iterator[tuple[list[Path], Tensor]]:
    """Files in their order with their images [B, C, H, W] between 0 and 1, read ahead by threads; bad ones go to `on_bad`."""
    names: list[Path] = []
    images: list[Tensor] = []
    with closing(_read_ahead(paths, partial(_read, spec, dtype), workers, 2 * batch_size)) as reading:
        for path, future in reading:
            try:
                images.append(future.result())
                names.append(path)
            except BadImage as error:
                if on_bad is None:
                    raise
                on_bad(path, error)
            if len(images) == batch_size:
                yield names, torch.stack(images)
                names, images = [], []
    if images:
        yield names, torch.stack(images)


def _read(spec: DataSpec, dtype: torch.dtype, path: Path) -> Tensor:
    """One file as the model takes it but for normalisation: [C, H, W], values between 0 and 1."""
    fit = Fit(spec.channels, spec.size, image_header(path).floating, spec.centre)
    return scaled(torch.tensor(fit.read(os.fspath(path))), torch.device("cpu"), dtype)


def _read_ahead(
    paths: Iterable[Path], read: Callable[[Path], Tensor], workers: int, ahead: int
) -> Generator[tuple[Path, Future[Tensor]], None, None]:
    """Paths with their images on the way, in order, never more than `ahead` of what was taken."""
    waiting: deque[tuple[Path, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for path in paths:
                waiting.append((path, pool.submit(read, path)))
                if len(waiting) == ahead:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for _, future in waiting:
                future.cancel()


def _predict_batch(
    model: Any, spec: DataSpec, names: Sequence[Path], images: Tensor, embeddings: bool, group: Group | None
) -> Predictions:
    x = normalised(images, spec)
    features = None
    # Per batch, so that whoever consumes the batches finds the model and the gradients in their own state.
    with evaluating(model):
        if embeddings:
            maps = model.forward_features(x)
            logits, features = model.forward_head(maps), model.forward_head(maps, pre_logits=True).cpu()
        else:
            logits = model(x)
        check_answers(logits, (len(x), spec.num_classes), spec, names)
        agreement = None
        if group is not None:
            black, label = normalised_black(spec), logits.argmax(1)
            same = torch.ones(len(x))
            for element in range(1, group.order):
                same += (model(turn_by_element(x, group, element, black)).argmax(1) == label).cpu()
            agreement = same / group.order
    return Predictions(tuple(names), logits.float().softmax(1).cpu(), agreement, features)


def check_answers(logits: Tensor, shape: tuple[int, ...], spec: DataSpec, names: Sequence[Path]) -> None:
    """Refuses logits of another shape, and such as are no numbers."""
    if logits.shape != shape:
        raise ValueError(f"{spec.name} has {spec.num_classes} classes, the model returns shape {list(logits.shape)}")
    broken = (~torch.isfinite(logits)).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"{printable(names[broken[0]])}: the model returns NaN or infinity; are its weights whole?")


def _table_rows(batch: Predictions, spec: DataSpec, digits: int) -> Iterator[list[str]]:
    confidence, label = batch.probabilities.max(1)
    for i, path in enumerate(batch.paths):
        numbers = [confidence[i].item(), *batch.probabilities[i].tolist()]
        if batch.agreement is not None:
            numbers.append(batch.agreement[i].item())
        yield [str(path), spec.classes[int(label[i])], *(f"{number:.{digits}g}" for number in numbers)]
