"""Turning encoded bytes into an RGB image, or into a reason why not. Runs in the pool's worker processes.

Pillow reads only the formats that datasets may hold. Orientation from EXIF is applied; palette, grey, 16-bit, CMYK and
alpha become RGB as transformers does it (alpha is dropped, not blended; 16-bit grey keeps its high byte).
"""

import io
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFile, ImageOps

ALL_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
MAX_IMAGE_PIXELS = 1 << 27
"""Images with more pixels are refused before they are decoded (134 Mpx; decoded, 400 MB)."""
MAX_SOURCE_BYTES = 1 << 30

ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # checked here, with a message that says what was found


class UndecodableError(ValueError):
    """Why a medium cannot be used; its text becomes BadMedia.reason."""


def decode_image(data: bytes, formats: Sequence[str] = ()) -> Image.Image:
    """The first frame of an encoded image as RGB. `formats` is what its name promised; empty promises nothing."""
    if not data:
        raise UndecodableError("empty: 0 bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        _check(image, formats)
        try:
            image.load()
            image = ImageOps.exif_transpose(image)
        except Exception as error:  # decoders raise many kinds; all of them mean that these bytes are no image
            raise UndecodableError(f"truncated or corrupt {image.format}: {type(error).__name__}: {error}") from error
        return _to_rgb(image)


def image_format(data: bytes) -> str:
    """Pillow's name of what the bytes are, from their header."""
    with _open(data) as image:
        return image.format or ""


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=ALL_FORMATS)
    except (OSError, ValueError, ArithmeticError) as error:
        raise UndecodableError(f"not an image of a known format ({len(data)} bytes, first {data[:8]!r})") from error


def _check(image: Image.Image, formats: Sequence[str]) -> None:
    if formats and image.format not in formats:
        raise UndecodableError(f"mislabelled: named as {formats[0]}, holds {image.format}")
    width, height = image.size
    if width <= 0 or height <= 0:
        raise UndecodableError(f"zero-sized: {width}x{height}")
    if width * height > MAX_IMAGE_PIXELS:
        raise UndecodableError(
            f"decompression bomb: {width}x{height} = {width * height} pixels; at most {MAX_IMAGE_PIXELS} are decoded"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # Pillow's own conversion clips at 255: almost everything turns white
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise UndecodableError("floating-point samples have no agreed range; convert to 8 or 16 bits")
    return image.convert("RGB")
