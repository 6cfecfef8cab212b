"""The kernels `thumbnail` and `video_thumbnail`: a small JPEG for people to look at, as [N] uint8, its file's bytes.

A video becomes a strip: a few frames from its first to its last, side by side. Neither is counted as a medium that was
processed, because no model sees it.
"""

import io
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.kernel import Medium, Plan, Recipe, VideoRecipe
from dataplane.media.recipes.rgb import shrink
from dataplane.media.videos import Video

QUALITIES = (85, 70, 50, 30)
"""The JPEG qualities that are tried before the thumbnail is made smaller."""
MAX_WIDTH = 65500
"""The largest width of a JPEG in pixels that its library writes."""
SMALLEST_SIDE = 8
"""A thumbnail with this longest side in pixels is not made smaller."""


MaxSide = Annotated[int, Meta(ge=SMALLEST_SIDE, le=4096)]
"""The maximum length of the longer side in pixels, of an image or of each frame. Smaller media are not enlarged."""
MaxBytes = Annotated[int, Meta(ge=1024, le=1 << 20)]
"""The maximum size of the file in bytes. Quality and size are lowered until the file fits."""


class Thumbnail(Recipe, frozen=True, kw_only=True):
    """The recipe of the kernel `thumbnail`. Unknown fields and values out of range are refused."""

    medium: ClassVar[Medium] = "image"

    kernel: Literal["thumbnail"]
    version: Literal[1]
    max_side: MaxSide = 256
    max_bytes: MaxBytes = 8192

    def plan(self, source: Image.Image) -> Plan:
        """Return the plan for an RGB image."""
        return _plan([source], source.width * source.height, self.max_side, self.max_bytes)


class VideoThumbnail(VideoRecipe, frozen=True, kw_only=True):
    """The recipe of the kernel `video_thumbnail`. Unknown fields and values out of range are refused."""

    kernel: Literal["video_thumbnail"]
    version: Literal[1]
    max_side: MaxSide = 256
    max_bytes: MaxBytes = 8192
    num_frames: Annotated[int, Meta(ge=1, le=16)] = 4
    """The number of frames of the strip; a shorter video gives all its frames."""

    def __post_init__(self) -> None:
        if self.num_frames * self.max_side > MAX_WIDTH:
            raise ValueError(
                f"{self.num_frames} frames of up to {self.max_side} pixels are wider than a JPEG may be ({MAX_WIDTH}); "
                "lower num_frames or max_side"
            )

    def plan(self, source: Video) -> Plan:
        """Return the plan for a video's frames, which are evenly spaced from the first to the last."""
        num = min(self.num_frames, source.num_frames)
        indices = [round(at * (source.num_frames - 1) / max(1, num - 1)) for at in range(num)]
        frames = map(Image.fromarray, source.frames(indices))
        return _plan(frames, num * source.width * source.height, self.max_side, self.max_bytes)


def _plan(pictures: Iterable[Image.Image], num_pixels: int, max_side: int, max_bytes: int) -> Plan:
    encoded = np.frombuffer(
        _encoded([_shrunk(picture, max_side) for picture in pictures], max_side, max_bytes), np.uint8
    )

    def write(out: np.ndarray) -> None:
        out[:] = encoded

    return Plan(shape=(len(encoded),), meta={}, pixel_bytes=num_pixels * 3, write=write)


def _encoded(pictures: list[Image.Image], side: int, max_bytes: int) -> bytes:
    """Return the pictures, whose longest side is `side`, side by side as one JPEG file that is not too large."""
    while True:
        strip = _side_by_side(pictures)
        for quality in QUALITIES:
            file = io.BytesIO()
            strip.save(file, "JPEG", quality=quality)
            if file.tell() <= max_bytes or (side == SMALLEST_SIDE and quality == QUALITIES[-1]):
                return file.getvalue()
        side = max(SMALLEST_SIDE, side * 3 // 4)
        pictures = [_shrunk(picture, side) for picture in pictures]


def _shrunk(picture: Image.Image, side: int) -> Image.Image:
    size = shrink(picture.width, picture.height, side)
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _side_by_side(pictures: list[Image.Image]) -> Image.Image:
    if len(pictures) == 1:
        return pictures[0]
    width, height = pictures[0].size
    strip = Image.new("RGB", (width * len(pictures), height))
    for at, picture in enumerate(pictures):
        strip.paste(picture, (width * at, 0))
    return strip
