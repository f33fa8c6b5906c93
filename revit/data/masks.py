"""Anybody's own images with a class for each pixel: a folder of images and a folder of masks of the same names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revit.data.cache import fingerprint, keep_cached, load_cached
from revit.data.file_images import FileImages, Fit
from revit.data.finding import find_images
from revit.data.image_files import Refused, check_pixels, image_header, open_with_pillow, opened_file, printable
from revit.data.listing import PARTS, entries
from revit.data.npz import file_identity
from revit.data.registry import data_root, register_dataset
from revit.data.resize import crop_and_resize_mask
from revit.data.scan import Progress, Scan, reason, scan_images
from revit.data.spec import (
    IGNORED,
    BadImage,
    Crop,
    DataError,
    DataOptions,
    Dataset,
    DataSpec,
    Images,
    Pixels,
    stratified_split,
    too_many_bad,
)

CLASSES = "classes.txt"
LAYOUT = (
    "put images into ROOT/images and masks of the same names into ROOT/masks (images/7.jpg, masks/7.png), if you like below"
    " train, val and test (ROOT/train/images, ROOT/train/masks)"
)
_WORDS = {"train": "training", "val": "validation", "test": "test"}
_VERSION = 1  # of what is kept in the cache


class MaskedImages:
    """A split of image files with a mask file each. `labels` [N] are the commonest classes of the masks.

    With `keep` all are decoded once: they are of one size then, so that crops lose nothing.
    """

    def __init__(self, pairs: Sequence[_Pair], fit: Fit, *, keep: bool) -> None:
        self.images = FileImages([pair.image for pair in pairs], np.array([pair.commonest for pair in pairs], np.int64), fit)
        self.labels, self.masks = self.images.labels, [pair.mask for pair in pairs]
        self.kept: tuple[Pixels, NDArray[np.uint8]] | None = None
        if keep:
            pixels = np.empty((len(pairs), fit.channels, *fit.size), dtype=np.float32 if fit.floating else np.uint8)
            masks = np.empty((len(pairs), *fit.size), dtype=np.uint8)
            for i in range(len(pairs)):
                pixels[i], masks[i] = self.read_masked(i)
            self.kept = pixels, masks

    def __len__(self) -> int:
        return len(self.masks)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def read(self, index: int, crop: Crop | None = None) -> Pixels:
        return self.read_masked(index, crop)[0]

    def read_masked(self, index: int, crop: Crop | None = None) -> tuple[Pixels, NDArray[np.uint8]]:
        """An image [C, H, W] and its mask [H, W], cut and resized alike; masks take the nearest pixel."""
        size = self.images.fit.size
        if self.kept is None:
            mask = read_mask(self.masks[index])
            return self.images.read(index, crop), crop_and_resize_mask(mask, size, crop)
        pixels, mask = self.kept[0][index], self.kept[1][index]
        return self.images.fit.apply(pixels, self.name(index), crop).copy(), crop_and_resize_mask(mask, size, crop).copy()


def read_mask(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The class indices in a mask file, [H, W]; 255 stands for pixels that do not count. Raises `BadImage`."""
    with opened_file(path) as file:
        image = open_with_pillow(file)
        if image is None or image.format != "PNG":
            found = "not a PNG file" if image is None else f"a {image.format} file, which may change values"
            raise Refused(f"{found}; save masks as 8-bit grey PNG files of class indices")
        if image.mode not in ("L", "1"):
            raise Refused(f"{_MODES.get(image.mode, f'of the mode {image.mode}')}; {_FIXES.get(image.mode, _FIX)}")
        width, height = image.size
        check_pixels(1, height, width)
        image.load()
        return np.array(image, dtype=np.uint8)  # one bit: 0 and 1


_MODES = {
    "P": "a palette image, whose numbers may mean colours",
    "RGB": "a colour image (RGB)",
    "RGBA": "a colour image (RGBA)",
    "I": "of more than 8 bits",
    "I;16": "of more than 8 bits",
    "LA": "of two channels (grey and alpha)",
}
_FIX = "save it as an 8-bit grey PNG file with the class index of each pixel, 255 for pixels that do not count"
_FIXES = {"P": "if they are class indices, save them as grey: Image.fromarray(numpy.asarray(Image.open(FILE))).save(FILE)"}


@dataclass(frozen=True)
class _Pair:
    """An image and its mask, and what is known of the mask: its largest and its commonest class, -1 if all is ignored."""

    image: str
    mask: str
    part: str
    largest: int = -1
    commonest: int = 0


@register_dataset("masks")
def masks(options: DataOptions, progress: Progress | None = None) -> Dataset:
    """Your own images with a mask each: `images/` and `masks/`, PNG files of class indices, 255 for pixels that do not count.

    The classes are the lines of `classes.txt` in the root, if it is there, or else as many as the training masks hold. Parts
    that are not given are split off at random: the test part first, then the validation part from what remains. Every file is
    looked at before the first is used. If they are of one size and fit into `memory_gb`, they are decoded once and kept.
    """
    root = data_root(options)
    pairs, bad = _listed(root)
    pairs, notes = _split(pairs, options)
    scan = scan_images(
        [p.image for p in pairs], np.array([p.part == "train" for p in pairs]), str(root), options.size, progress
    )
    bad += [(printable(pairs[i].image), text) for i, text in scan.bad]
    unreadable = {i for i, _ in scan.bad}
    total = len(pairs) + len(bad) - len(unreadable)
    pairs, bad_masks = _looked_at([pair for i, pair in enumerate(pairs) if i not in unreadable])
    names = _class_names(root / CLASSES)
    pairs, beyond, classes = _classified(root, pairs, names)
    skipped = _left_out([*bad, *bad_masks, *beyond], total, options)
    for part, word in _WORDS.items():
        if not any(pair.part == part for pair in pairs):
            raise DataError(f"{printable(root)}: no {word} image is left without the bad files; replace them")
    keep = scan.one_size and len(pairs) * _bytes(scan) <= options.memory_gb * 2**30
    splits: list[Images] = [MaskedImages([p for p in pairs if p.part == part], scan.fit, keep=keep) for part in _WORDS]
    source = [f"folder {printable(root.resolve().name)}", *notes, *([f"{len(skipped)} bad files left out"] if skipped else [])]
    text = "; ".join(source)
    spec = DataSpec("masks", scan.channels, scan.size, classes, scan.mean, scan.std, text, task="segmentation")
    return Dataset(spec, *splits, skipped=tuple(skipped))


def _listed(root: Path) -> tuple[list[_Pair], list[tuple[str, str]]]:
    """Images with their masks, and the images without one, each with the reason."""
    pairs: list[_Pair] = []
    alone: list[tuple[str, str]] = []
    for part, folder in _part_folders(root).items():
        masks = _by_stem(folder / "masks")
        for stem, image in _by_stem(folder / "images").items():
            if stem in masks:
                pairs.append(_Pair(image, masks[stem], part))
            else:
                expected = printable(folder / "masks" / f"{stem}.png")
                alone.append((printable(image), f"has no mask {expected}; add the mask or remove the image"))
    if not pairs:
        raise DataError(f"{printable(root)}: no image has a mask; the first: {alone[0][0]} {alone[0][1]}")
    return pairs, alone


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each part, or the root for "" if images and masks lie there."""
    folders = {"": root}
    if not (root / "images").is_dir():
        named = [entry.name for entry in entries(root) if entry.name.lower() in PARTS and os.path.isdir(entry.path)]
        folders = {PARTS[name.lower()]: root / name for name in named}
        if "train" not in folders or len(folders) < len(named):
            raise DataError(f"{printable(root)}: has no folder images, nor one of each of train, val and test; {LAYOUT}")
    for folder in folders.values():
        for name in ("images", "masks"):
            if not (folder / name).is_dir():
                raise DataError(f"{printable(folder)}: has no folder {name}; {LAYOUT}")
    return folders


def _by_stem(folder: Path) -> dict[str, str]:
    """Files by their path below a folder, without the ending."""
    found: dict[str, str] = {}
    for path in find_images([str(folder)]):
        stem = os.path.splitext(os.path.relpath(path, folder))[0]
        if stem in found:
            raise DataError(f"{printable(path)}: {printable(found[stem])} has the same name before the dot; rename one of them")
        found[stem] = str(path)
    return found


def _split(pairs: list[_Pair], options: DataOptions) -> tuple[list[_Pair], list[str]]:
    """Every pair in a part, and what is to be said about that."""
    given = {pair.part for pair in pairs}
    parts = np.array([pair.part or "train" for pair in pairs], dtype="<U5")
    notes = []
    for part, fraction in (("test", options.test_fraction), ("val", options.val_fraction)):
        if part in given:
            continue
        pool = np.flatnonzero(parts == "train")
        held = stratified_split(np.zeros(len(pool), dtype=np.int64), fraction, options.split_seed)[1]
        if not len(held):
            raise DataError(f"{len(pool)} images with masks are too few to split off a {_WORDS[part]} part; add images")
        parts[pool[held]] = part
        whole = "all images" if given == {""} and part == "test" else "the training images"
        notes.append(f"{_WORDS[part]}: {fraction:g} of {whole}, seed {options.split_seed}")
    return [_Pair(p.image, p.mask, str(part)) for p, part in zip(pairs, parts, strict=True)], notes


def _looked_at(pairs: list[_Pair]) -> tuple[list[_Pair], list[tuple[str, str]]]:
    """Pairs whose masks were looked at, and the bad ones. What was found is kept until a file changes."""
    found: list[_Pair] = []
    bad: list[tuple[str, str]] = []
    for pair in pairs:
        try:
            key = f"masks/{fingerprint(_VERSION, file_identity(Path(pair.image)), file_identity(Path(pair.mask)))}.json"
            facts = load_cached(key)
            if not (isinstance(facts, list) and len(facts) == 2 and all(isinstance(fact, int) for fact in facts)):
                facts = _facts(pair)
                keep_cached(key, facts)
            found.append(_Pair(pair.image, pair.mask, pair.part, *facts))
        except BadImage as error:
            bad.append((printable(pair.mask), reason(error, pair.mask)))
        except OSError as error:
            bad.append((printable(pair.mask), f"cannot be read ({error.strerror}); mend it or remove its image"))
    return found, bad


def _facts(pair: _Pair) -> list[int]:
    """The largest and the commonest class of a mask, which must have the size of its image."""
    header, mask = image_header(pair.image), read_mask(pair.mask)
    if mask.shape != (header.height, header.width):
        raise BadImage(
            f"{printable(pair.mask)}: {mask.shape[0]} x {mask.shape[1]} pixels, but its image {printable(pair.image)} has"
            f" {header.height} x {header.width}; make them equal, resizing masks by the nearest pixel"
        )
    counts = np.bincount(mask[mask != IGNORED], minlength=1)
    return [len(counts) - 1 if counts.any() else -1, int(counts.argmax())]


def _class_names(path: Path) -> tuple[str, ...] | None:
    """The lines of `classes.txt`, if there is one."""
    if not path.is_file():
        return None
    try:
        lines = tuple(printable(line.strip()) for line in path.read_bytes()[: 1 << 20].decode("utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{printable(path)}: cannot be read as text; write one class name a line, that of 0 first") from error
    names = tuple(line for line in lines if line)
    if not 2 <= len(names) <= IGNORED or len(set(names)) < len(names):
        raise DataError(f"{printable(path)}: {len(names)} lines; write 2 to {IGNORED} different names, that of class 0 first")
    return names


def _classified(
    root: Path, pairs: list[_Pair], names: tuple[str, ...] | None
) -> tuple[list[_Pair], list[tuple[str, str]], tuple[str, ...]]:
    """The pairs whose masks keep to the classes, those that do not, and the names of the classes."""
    largest = max((pair.largest for pair in pairs if pair.part == "train"), default=-1)
    if names is None and largest < 1:
        raise DataError(
            f"{printable(root)}: the training masks hold no class but 0 (255 is for pixels that do not count);"
            " a mask of black and white must hold 0 and 1, not 0 and 255"
        )
    classes = names or tuple(map(str, range(largest + 1)))
    limit = f"{CLASSES if names else 'the training masks'} end{'s' if names else ''} at {len(classes) - 1}"
    fit, beyond = [], []
    for pair in pairs:
        if pair.largest < len(classes):
            fit.append(pair)
        else:
            text = f"has the class {pair.largest}, but {limit}; correct the mask, or name all classes in {CLASSES}"
            beyond.append((printable(pair.mask), text))
    return fit, beyond, classes


def _left_out(bad: list[tuple[str, str]], total: int, options: DataOptions) -> list[tuple[str, str]]:
    """Names and reasons of the files to leave out, or the error that they are."""
    share = f"{len(bad)} of {total} images cannot be used"
    if bad and options.on_bad == "stop":
        raise BadImage(f"{bad[0][0]}: {bad[0][1]} ({share}; --on-bad skip goes on without them)")
    if len(bad) > options.max_bad * total:
        raise too_many_bad(len(bad), total, options.max_bad, f"{bad[0][0]}: {bad[0][1]}")
    return bad


def _bytes(scan: Scan) -> int:
    """Memory of one image and its mask."""
    return (scan.channels * (4 if scan.floating else 1) + 1) * scan.size[0] * scan.size[1]
