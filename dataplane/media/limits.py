"""The limits on media that a node decodes. Standard library only. The node's owner sets them, and the workers apply
them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The limits for one medium. A medium above a limit goes into quarantine; the reason has the number that was
    found."""

    max_image_pixels: int = 1 << 27
    """The maximum number of pixels of an image or of one frame. Larger ones are refused before they are decoded (134
    Mpx, 400 MB when decoded)."""
    max_media_bytes: int = 1 << 29
    """The maximum size of a medium in encoded bytes."""
    max_video_frames: int = 1 << 20
    """The maximum number of frames of a video, sampled or not (9.7 hours at 30 frames a second)."""
    max_decode_seconds: float = 120.0
    """The maximum time in seconds that a worker may spend on one medium; after that the worker is killed."""

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if not 0 < value < 1 << 62:
                raise ValueError(f"{name} is {value}; wanted a number above 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the limits as JSON-safe values, for the start of a worker."""
        return {
            "max_image_pixels": self.max_image_pixels,
            "max_media_bytes": self.max_media_bytes,
            "max_video_frames": self.max_video_frames,
            "max_decode_seconds": self.max_decode_seconds,
        }


DEFAULT_LIMITS = MediaLimits()
