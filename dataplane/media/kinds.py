"""The kinds of media: which formats file names promise, and the error for bytes that cannot be decoded.

Standard library only. Decoding is in `images` and `videos`, and runs in the pool's worker processes.
"""

from collections.abc import Mapping
from typing import Literal

MediaKind = Literal["image", "video"]

PART_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
"""The kind of medium of each type of part in a chat turn, as transformers and OpenAI write them."""

MEDIA_FORMATS: Mapping[str, tuple[str, ...]] = {
    "png": ("PNG",),
    "jpg": ("JPEG", "MPO"),
    "jpeg": ("JPEG", "MPO"),
    "webp": ("WEBP",),
    "bmp": ("BMP", "DIB"),
    "gif": ("GIF",),
    "tif": ("TIFF",),
    "tiff": ("TIFF",),
    "ppm": ("PPM",),
    "mp4": ("MP4", "MOV"),
    "m4v": ("MP4", "MOV"),
    "mov": ("MOV", "MP4"),
    "webm": ("WEBM",),
    "mkv": ("MKV", "WEBM"),
    "avi": ("AVI",),
}
"""The formats that a file with this last extension may have. A file with other content is mislabelled.

Image formats have Pillow's names, video containers those of `dataplane.media.containers`.
"""


VIDEO_FORMATS = frozenset({"MP4", "MOV", "WEBM", "MKV", "AVI"})
_VIDEO_MARKS = ((4, b"ftyp"), (4, b"moov"), (4, b"mdat"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI "))
"""The bytes near the beginning of a file that mark a video container, with their offset."""


class UndecodableError(ValueError):
    """A medium cannot be decoded. The text becomes the reason in `BadMedia`."""


def kind_of(formats: tuple[str, ...], head: bytes = b"") -> MediaKind:
    """Return the kind of a medium, from the formats that its name promises, or else from its first bytes. An unknown
    medium counts as an image.

    This is only a first guess: decoding fails with a reason if it is wrong.
    """
    if formats:
        return "video" if formats[0] in VIDEO_FORMATS else "image"
    return "video" if any(head[at : at + len(mark)] == mark for at, mark in _VIDEO_MARKS) else "image"


def check_label(found: str, formats: tuple[str, ...]) -> None:
    """Raise UndecodableError unless `found` is one of the formats that the file's name promises. An empty tuple
    promises none."""
    if formats and found not in formats:
        raise UndecodableError(f"mislabelled: named as {formats[0]}, holds {found}")
