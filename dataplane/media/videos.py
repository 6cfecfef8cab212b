"""Opens a video and gives its frames, by the decoder that the recipe names. Runs in the pool's worker processes.

A decoder's library is imported with its first video, or before by `load_decoder`. Frames are decoded one at a time, so
a sample of many frames is never in memory as a whole. Bytes reach a decoder only after the checks of `containers.py`
and `video_headers.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from dataplane.media.containers import check_container
from dataplane.media.kinds import UndecodableError, check_label
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.media.video_headers import largest_frame

VideoDecoder = Literal["pyav", "decord"]
"""The libraries that decode videos. They bring their own FFmpeg: PyAV a current one, decord 0.6 that of 2018."""
DEFAULT_DECODER: VideoDecoder = "pyav"


class FrameReader(Protocol):
    """The frames of an opened video, as one of the libraries reads them."""

    num_frames: int
    fps: float

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frame [height, width, 3] uint8 of each index."""
        ...


class Video:
    """An opened video. The constructor and `frames` raise UndecodableError, which says why the video cannot be
    decoded."""

    def __init__(
        self,
        data: bytes,
        formats: tuple[str, ...] = (),
        limits: MediaLimits = DEFAULT_LIMITS,
        decoder: VideoDecoder = DEFAULT_DECODER,
    ) -> None:
        self.format = check_container(data)
        """The format of the container: MP4, MOV, WEBM, MKV or AVI."""
        check_label(self.format, formats)
        _check_size(*largest_frame(data, self.format), limits)
        self._reader: FrameReader = load_decoder(decoder)(data, self.format, limits)
        self.num_frames = self._reader.num_frames
        self.fps = self._reader.fps
        """The frames per second; the average, if the rate is not steady."""
        if not (math.isfinite(self.fps) and 0 < self.fps <= 100_000):
            raise UndecodableError(f"{self.fps} frames a second; wanted more than 0 and at most 100000")
        if not self.num_frames:
            raise UndecodableError(f"truncated or corrupt {self.format}: it has no frames")
        first = next(self.frames([0]))
        self.height, self.width = first.shape[:2]
        _check_size(self.width, self.height, limits)

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frame [height, width, 3] uint8 of each index. Ascending indices are the fastest."""
        return self._reader.frames(indices)


def load_decoder(decoder: VideoDecoder) -> Callable[[bytes, str, MediaLimits], FrameReader]:
    """Import a decoder's library, and return the class that opens a video of a container with it. Raises ImportError
    where the library is not installed."""
    if decoder == "pyav":
        from dataplane.media.pyav_frames import PyavFrames

        return PyavFrames
    from dataplane.media.decord_frames import DecordFrames

    return DecordFrames


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise UndecodableError(
            f"decompression bomb: frames of {width}x{height} = {width * height} pixels; "
            f"at most {limits.max_image_pixels} are decoded"
        )
