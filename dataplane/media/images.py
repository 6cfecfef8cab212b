"""Decodes encoded bytes into an RGB image, or gives the reason why this fails. Runs in the pool's worker processes.

Pillow reads only the formats that datasets may hold. EXIF orientation is applied. Palette, grey, 16-bit, CMYK and alpha
become RGB as in transformers (alpha is dropped, not blended), but 16-bit grey keeps its high byte.
"""

import io
import warnings

import numpy as np
from PIL import Image, ImageFile, ImageOps

from dataplane.media.kinds import UndecodableError, check_label
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")

ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # this module checks the size itself, with a message that says what was found


def decode_image(
    data: bytes, formats: tuple[str, ...] = (), limits: MediaLimits = DEFAULT_LIMITS
) -> tuple[Image.Image, str]:
    """Return the first frame of an encoded image as RGB, and Pillow's name of its format.

    `formats` are those that the file name promises; an empty tuple promises none. Raises UndecodableError with the
    reason.
    """
    if not data:
        raise UndecodableError("empty: 0 bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        found = image.format or ""
        _check(image, found, formats, limits)
        try:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
        except MemoryError:
            raise  # this error is not about the bytes
        # decoders raise many kinds of errors; all of them mean that these bytes are not an image
        except Exception as error:
            raise UndecodableError(f"truncated or corrupt {found}: {type(error).__name__}: {error}") from error
        return _to_rgb(image, found), found


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise UndecodableError(f"not an image of a known format ({len(data)} bytes, first {data[:8]!r})") from error
    except Exception as error:  # the plugin recognised the header and could not read it
        raise UndecodableError(f"corrupt header: {type(error).__name__}: {error}") from error


def _check(image: Image.Image, found: str, formats: tuple[str, ...], limits: MediaLimits) -> None:
    check_label(found, formats)
    width, height = image.size
    if width <= 0 or height <= 0:
        raise UndecodableError(f"zero-sized: {width}x{height}")
    if width * height > limits.max_image_pixels:
        raise UndecodableError(
            f"decompression bomb: {width}x{height} = {width * height} pixels; "
            f"at most {limits.max_image_pixels} are decoded"
        )


def _to_rgb(image: Image.Image, found: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "F" or (image.mode == "I" and found == "TIFF"):
        raise UndecodableError(f"samples of mode {image.mode} have no agreed range; convert to 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow's own conversion clips at 255, so that almost everything turns white
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")
