"""Reading one image file, of any usual format, into an array [C, H, W].

Files come from anywhere: the content decides on the format (not the name), the size is checked in the header before a pixel
is decoded, and whatever is wrong with a file ends in one `BadImage` that names it.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from revit.data.spec import MAX_PIXELS, BadImage, DataError, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".npy")
)
"""Names of image files end in one of these, in upper or lower case."""

MAX_BYTES = 1 << 30
MAX_CHANNELS = 64
MAX_SAMPLES = 4 * MAX_PIXELS  # channels count too: 64 of them would fill 16 GB
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # none of those that start other programs
_QUIET = threading.RLock()
_LOGS = (logging.getLogger("PIL"), logging.getLogger("tifffile"))
_NOWHERE = logging.NullHandler()


class ImageHeader(NamedTuple):
    """What is known of an image before it is decoded."""

    channels: int
    height: int
    width: int
    floating: bool  # more than 8 bits: the pixels will be float32


@dataclass(frozen=True)
class EncodedImage:
    """An open file: its header, and the function that decodes the rest."""

    header: ImageHeader
    decode: Callable[[], Pixels]


@dataclass(frozen=True)
class ImageBytes:
    """What an image file would hold, if it were a file of its own, and what to call it in errors."""

    data: bytes
    name: str


ImageSource = str | os.PathLike[str] | ImageBytes


class Refused(Exception):
    """Why a file is no image for us, and the fix. Whoever knows the path adds it."""


class NeedsPackage(Exception):
    """The file may be fine: a package that reads it is missing."""


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def printable(path: str | os.PathLike[str]) -> str:
    """A path as one line that any terminal and file takes: names that are not UTF-8 or hold control characters are escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def source_name(source: ImageSource) -> str:
    """What errors call an image, as one printable line."""
    return source.name if isinstance(source, ImageBytes) else printable(source)


def read_image(source: ImageSource) -> Pixels:
    """The image in a file, [C, H, W]: uint8, or float32 with 0 as black and 1 as white where the file has more than 8 bits.

    Grey images have 1 channel and colour images 3; alpha is dropped, a palette is looked up, the EXIF orientation is applied
    and of an animation the first frame is taken. TIFF and .npy may have up to 64 channels; floats are taken as they are.
    Colour PNG and PPM of 16 bits are read with 8, as Pillow does.
    """
    with _opened(source) as image:
        return image.decode()


def image_header(source: ImageSource) -> ImageHeader:
    """Channels, height, width and kind of the image that `read_image` gives, without decoding its pixels."""
    with _opened(source) as image:
        return image.header


@contextmanager
def _opened(source: ImageSource) -> Iterator[EncodedImage]:
    with opened_file(source) as file:
        image = _encoded(file)
        check_pixels(image.header.channels, image.header.height, image.header.width)
        yield image


@contextmanager
def opened_file(source: ImageSource) -> Iterator[IO[bytes]]:
    """The content of a source; whatever goes wrong, here or while it is decoded, becomes an error with its name in it."""
    shown = source_name(source)
    try:
        with _quiet(), _checked_file(source) as file:
            yield file
    except (DataError, MemoryError):
        raise
    except NeedsPackage as error:
        raise DataError(f"{shown}: {error}") from error
    except Refused as error:
        raise BadImage(f"{shown}: {error}") from error
    except FileNotFoundError as error:
        if not isinstance(source, ImageBytes) and os.path.islink(source):
            target = printable(os.readlink(source))
            raise BadImage(f"{shown}: a link to {target}, which does not exist; mend the link") from error
        raise BadImage(f"{shown}: no such file; put it back or remove it from the list") from error
    except PermissionError as error:
        raise BadImage(f"{shown}: no permission to read it; try chmod +r") from error
    except Exception as error:  # decoders raise nearly anything for broken bytes: struct.error, SyntaxError, IndexError, ...
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise BadImage(f"{shown}: damaged, it cannot be decoded ({reason}); replace or remove it") from error


def _checked_file(source: ImageSource) -> IO[bytes]:
    """The content, open, if it is a plain file of a size that we read."""
    if isinstance(source, ImageBytes):
        _check_bytes(len(source.data))
        return io.BytesIO(source.data)
    found = os.stat(source)
    if stat.S_ISDIR(found.st_mode):
        raise Refused("a folder, not an image file; name a file in it")
    if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever
        raise Refused("not a regular file; replace or remove it")
    _check_bytes(found.st_size)
    return open(source, "rb")


def _check_bytes(count: int) -> None:
    if count == 0:
        raise Refused("empty, it has 0 bytes; replace or remove it")
    if count > MAX_BYTES:
        raise Refused(f"{count} bytes, more than the {MAX_BYTES} that are read; store it smaller")


def check_pixels(channels: int, height: int, width: int) -> None:
    """Refuses images that nobody means, before they are decoded."""
    if min(channels, height, width) < 1:
        raise Refused(f"no pixels: {channels} channels of {height} x {width}; replace or remove it")
    if channels > MAX_CHANNELS:
        raise Refused(f"{channels} channels, more than {MAX_CHANNELS}; is one of the axes not a channel?")
    if height * width > MAX_PIXELS or channels * height * width > MAX_SAMPLES:
        raise Refused(f"{height} x {width} pixels are too many (at most {MAX_PIXELS:,}); cut or shrink it")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what libraries have to say about odd files to itself. The settings for this are global, so threads take turns."""
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [log.propagate for log in _LOGS]
        for log in _LOGS:
            log.addHandler(_NOWHERE)
            log.propagate = False
        try:
            yield
        finally:
            for log, propagate in zip(_LOGS, before, strict=True):
                log.removeHandler(_NOWHERE)
                log.propagate = propagate


def _encoded(file: IO[bytes]) -> EncodedImage:
    start = file.read(8)
    file.seek(0)
    if start.startswith(b"\x93NUMPY"):
        return _npy(file)
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        from revit.data.tiff_files import encoded_tiff

        return encoded_tiff(file)
    image = open_with_pillow(file)
    if image is None:
        raise Refused(f"not an image that can be read ({', '.join(_FORMATS)} or .npy), or its start is damaged; remove it")
    return encoded_by_pillow(image)


def open_with_pillow(file: IO[bytes]) -> Image | None:
    """The image as Pillow sees it, not decoded, or nothing if Pillow does not know it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise NeedsPackage("reading image files needs Pillow: pip install Pillow") from error
    try:
        return Image.open(file, formats=_FORMATS)
    except UnidentifiedImageError:
        return None
    except Image.DecompressionBombError as error:
        raise Refused(f"too many pixels (at most {MAX_PIXELS:,}); cut or shrink it") from error


def encoded_by_pillow(image: Image) -> EncodedImage:
    """Header and decoder of an image that Pillow has opened."""
    width, height = image.size
    # Pillow turns TIFF files itself and counts the turn in already. To look for EXIF behind the pixels, it would decode a PNG.
    known = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    if known and _orientation(image) >= 5:
        height, width = width, height
    floating = image.mode[0] in "IF"
    channels = 1 if floating or image.mode in ("1", "L", "LA", "La") else 3
    return EncodedImage(ImageHeader(channels, height, width, floating), lambda: _decode_with_pillow(image, channels))


def _decode_with_pillow(image: Image, channels: int) -> Pixels:
    image.load()
    if image.mode.startswith("I"):  # 16 bits, which Pillow may hold as 32
        pixels = np.asarray(image).astype(np.float32) / 65535
    elif image.mode == "F":
        pixels = scaled(np.asarray(image))
    else:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return oriented(channels_first(pixels, axis=2), _orientation(image))


def _orientation(image: Image) -> int:
    """The EXIF orientation, 1 to 8. EXIF that cannot be read says nothing about the pixels, which may be fine."""
    try:
        return known_orientation(image.getexif().get(0x0112, 1))
    except Exception:
        return 1


def known_orientation(value: Any) -> int:
    """An orientation as files give it, or 1, upright, if there is no such orientation."""
    return int(value) if value in range(1, 9) else 1


def oriented(image: Pixels, orientation: int) -> Pixels:
    """[C, H, W] -> [C, H, W] or [C, W, H]: upright, for the orientation that a camera has noted (1 to 8)."""
    if orientation >= 5:
        image = image.swapaxes(1, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[:, ::-1]
    return np.require(image, requirements=["C", "W"])  # arrays from Pillow are read-only


def scaled(pixels: Pixels) -> Pixels:
    """uint8 as it is; float32 of 16-bit values between 0 and 1; floats as they are if all are finite."""
    if pixels.dtype == np.uint16:
        return pixels.astype(np.float32) / 65535
    if pixels.dtype.kind == "f":
        pixels = pixels.astype(np.float32)
        if not np.isfinite(pixels).all():
            raise Refused("some of its values are not finite; replace NaN and infinity")
    return pixels


def check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.kind != "f" and dtype.newbyteorder("=") not in (np.dtype(np.uint8), np.dtype(np.uint16)):
        raise Refused(f"its values are {dtype}; save it as uint8, uint16 or float32")


def channel_axis(shape: tuple[int, ...]) -> int:
    """Of three axes, the one of the channels: the shorter of the first and the last, and the last if they are equal."""
    return 0 if shape[0] < shape[-1] else 2


def channels_first(pixels: Pixels, axis: int) -> Pixels:
    """[H, W], [C, H, W] or [H, W, C] with the channels at this axis -> [C, H, W]."""
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, axis, 0)


def _npy(file: IO[bytes]) -> EncodedImage:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise Refused(f"a .npy file of version {version}, which numbers do not need; save it again with numpy.save")
    shape, _, dtype = readers[version](file)
    check_dtype(dtype)
    if len(shape) not in (2, 3):
        raise Refused(f"its array has shape {shape}; an image has 2 or 3 axes")
    start = file.tell()
    if file.seek(0, os.SEEK_END) - start < np.prod(shape, dtype=object) * dtype.itemsize:
        raise Refused(f"shorter than its array of shape {shape} needs; copy it again")

    def decode() -> Pixels:
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return np.ascontiguousarray(channels_first(scaled(native), axis))

    axis = channel_axis(shape)
    height, width = (size for i, size in enumerate(shape) if len(shape) == 2 or i != axis)
    channels = 1 if len(shape) == 2 else shape[axis]
    return EncodedImage(ImageHeader(channels, height, width, dtype != np.uint8), decode)
