"""Which media there are: what file names promise, and the error that says why bytes are no medium.

Standard library only: decoding is in `images` and `videos`, and runs in the pool's worker processes.
"""

from collections.abc import Mapping

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

Image formats by Pillow's names, containers of video by those of `dataplane.containers`.
"""


class UndecodableError(ValueError):
    """Why a medium cannot be used; its text becomes BadMedia.reason."""


def check_label(found: str, formats: tuple[str, ...]) -> None:
    """UndecodableError unless `found` is one of what the file's name promised; no formats promise nothing."""
    if formats and found not in formats:
        raise UndecodableError(f"mislabelled: named as {formats[0]}, holds {found}")
