"""TIFF files, which hold more than pictures: many channels, 16 bits per colour, floats, stacks of pages.

What Pillow reads without loss, Pillow reads. The rest needs the package tifffile.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from revit.data.image_files import (
    EncodedImage,
    ImageHeader,
    NeedsPackage,
    Refused,
    channel_axis,
    channels_first,
    check_dtype,
    encoded_by_pillow,
    known_orientation,
    open_with_pillow,
    oriented,
    scaled,
)
from revit.data.spec import Pixels

_BITS, _COLOURS, _ORIENTATION, _EXTRA = 258, 262, 274, 338  # numbers of the TIFF tags
_CMYK = 5
_FRAMES = "ITZ"  # axes of which the first image is taken: pages, times, depths
_CHANNELS = "SCQ"  # samples, channels, and the axis that tifffile writes for an array it knows nothing about


def encoded_tiff(file: IO[bytes]) -> EncodedImage:
    """Header and decoder of a TIFF file."""
    image = open_with_pillow(file)
    if image is not None and _is_plain(image):
        return encoded_by_pillow(image)
    file.seek(0)
    return _encoded_by_tifffile(file)


def _is_plain(image: Any) -> bool:
    """Whether Pillow gives all that is in the file: it cuts colours to 8 bits, and leaves out pages and unnamed channels."""
    tags = image.tag_v2
    bits = tags.get(_BITS, (1,))
    if image.mode == "I" or 0 in tags.get(_EXTRA, ()) or image.n_frames > 1:
        return False
    return len(bits) == 1 or max(bits) <= 8 or tags.get(_COLOURS) == _CMYK


def _encoded_by_tifffile(file: IO[bytes]) -> EncodedImage:
    try:
        import tifffile
    except ModuleNotFoundError as error:
        raise NeedsPackage(
            "TIFF files with 16-bit colours, many channels or pages need tifffile: pip install tifffile"
        ) from error
    source: Any = tifffile.TiffFile(file, _multifile=False).series[0]
    page = source.keyframe
    if source.axes[0] in _FRAMES and source.axes[1:] == page.axes:
        source = page
    axes, shape = source.axes, source.shape
    if axes not in ("YX", *(f"{c}YX" for c in _CHANNELS), *(f"YX{c}" for c in _CHANNELS)):
        raise Refused(f"its axes are {axes}, of lengths {shape}; save one image with at most an axis of channels")
    check_dtype(source.dtype)
    axis = channel_axis(shape) if "Q" in axes else max(axes.find("S"), axes.find("C"))
    height, width = (size for i, size in enumerate(shape) if axes == "YX" or i != axis)
    samples = 1 if axes == "YX" else shape[axis]
    # Extra samples come last. Those named alpha are dropped, the unnamed ones are channels.
    alpha = [samples - len(page.extrasamples) + i for i, kind in enumerate(page.extrasamples) if kind in (1, 2)]
    orientation = known_orientation(page.tags.valueof(_ORIENTATION))
    if orientation >= 5:
        height, width = width, height

    def decode() -> Pixels:
        try:
            pixels = source.asarray(maxworkers=1)
        except ValueError as error:
            if "imagecodecs" in str(error):
                raise NeedsPackage("its compression needs imagecodecs: pip install imagecodecs") from error
            raise
        if pixels.shape != shape:
            raise Refused(f"damaged, {pixels.shape} is not the shape {shape} of its header; replace or remove it")
        pixels = np.delete(channels_first(pixels, axis), alpha, axis=0)
        return oriented(scaled(pixels.astype(pixels.dtype.newbyteorder("="), copy=False)), orientation)

    return EncodedImage(ImageHeader(samples - len(alpha), height, width, source.dtype != np.uint8), decode)
