"""Which media there are: what file names promise, and the error that says why bytes are no medium.

Standard library only: decoding is in `images` and `videos`, and runs in the pool's worker processes.
"""

from collections.abc import Mapping
from typing import Literal

MediaKind = Literal["image", "video"]

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
"""Which formats a member's last extension may hold; a member with another content is mislabelled.

Image formats by Pillow's names, containers of video by those of `dataplane.media.containers`.
"""


VIDEO_FORMATS = frozenset({"MP4", "MOV", "WEBM", "MKV", "AVI"})
_VIDEO_MARKS = ((4, b"ftyp"), (4, b"moov"), (4, b"mdat"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI "))
"""Where a container of video says in its first bytes that it is one."""


class UndecodableError(ValueError):
    """Why a medium cannot be used; its text becomes BadMedia.reason."""


def kind_of(formats: tuple[str, ...], head: bytes = b"") -> MediaKind:
    """What a medium is by what its name promises, or where that is nothing by its first bytes; unknown is an image.

    Only a first sorting: whoever decodes the medium as what it is not says so.
    """
    if formats:
        return "video" if formats[0] in VIDEO_FORMATS else "image"
    return "video" if any(head[at : at + len(mark)] == mark for at, mark in _VIDEO_MARKS) else "image"


def check_label(found: str, formats: tuple[str, ...]) -> None:
    """UndecodableError unless `found` is one of what the file's name promised; no formats promise nothing."""
    if formats and found not in formats:
        raise UndecodableError(f"mislabelled: named as {formats[0]}, holds {found}")
