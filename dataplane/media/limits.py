"""What a node is willing to decode. Standard library only; the node's owner sets it, workers obey it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Bounds per medium; what is above one of them is quarantined with the number that was found."""

    max_image_pixels: int = 1 << 27
    """Pixels of an image or of one frame; more are refused before they are decoded (134 Mpx; decoded, 400 MB)."""
    max_media_bytes: int = 1 << 29
    """Encoded bytes of a medium."""
    max_video_frames: int = 1 << 20
    """Frames that a video may have, sampled or not (9.7 hours at 30 frames a second)."""
    max_decode_seconds: float = 120.0
    """Time that a worker may spend on one medium; then it is killed."""

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if not 0 < value < 1 << 62:
                raise ValueError(f"{name} is {value}; wanted a number above 0")

    def to_dict(self) -> dict[str, Any]:
        """The limits as JSON-safe values: what a worker is started with."""
        return {
            "max_image_pixels": self.max_image_pixels,
            "max_media_bytes": self.max_media_bytes,
            "max_video_frames": self.max_video_frames,
            "max_decode_seconds": self.max_decode_seconds,
        }


DEFAULT_LIMITS = MediaLimits()
