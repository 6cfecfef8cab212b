"""Decodes frames of videos with decord. Runs in the pool's worker processes, because the decoder may crash.

decord is imported with the first video. Frames are decoded one at a time, so a sample of many frames is never in memory
as a whole. A frame that the decoder would have to invent is an error.
"""

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dataplane.media.containers import check_container
from dataplane.media.kinds import UndecodableError, check_label
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.media.video_headers import largest_frame

_CHUNK_BYTES = 64 << 20
# decord counts frames that it replaces by a neighbour as faults; 0 would turn this check off
_NO_INVENTED_FRAMES = 1e-9


class Video:
    """An opened video. The constructor and `frames` raise UndecodableError, which says why the video cannot be
    decoded."""

    def __init__(self, data: bytes, formats: tuple[str, ...] = (), limits: MediaLimits = DEFAULT_LIMITS) -> None:
        self.format = check_container(data)
        """The format of the container: MP4, MOV, WEBM, MKV or AVI."""
        check_label(self.format, formats)
        _check_size(*largest_frame(data, self.format), limits)
        self._reader = _open(data, self.format)
        self._chunk = 1  # frames at a time; one until their size is known
        self.num_frames = len(self._reader)
        self.fps = float(self._reader.get_avg_fps())
        """The frames per second; the average, if the rate is not steady."""
        if self.num_frames > limits.max_video_frames:
            raise UndecodableError(f"{self.num_frames} frames; at most {limits.max_video_frames} are looked at")
        if not (math.isfinite(self.fps) and 0 < self.fps <= 100_000):
            raise UndecodableError(f"{self.fps} frames a second; wanted more than 0 and at most 100000")
        first = next(self.frames([0]))
        self.height, self.width = first.shape[:2]
        _check_size(self.width, self.height, limits)
        self._chunk = max(1, _CHUNK_BYTES // first.nbytes)

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frame [height, width, 3] uint8 of each index. Ascending indices are the fastest."""
        for at in range(0, len(indices), self._chunk):
            try:
                batch = self._reader.get_batch(list(indices[at : at + self._chunk])).asnumpy()
            except Exception as error:  # decord's own error, RuntimeError, IndexError, ...
                raise UndecodableError(f"truncated or corrupt {self.format}: {_first_line(error)}") from error
            yield from batch


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise UndecodableError(
            f"decompression bomb: frames of {width}x{height} = {width * height} pixels; "
            f"at most {limits.max_image_pixels} are decoded"
        )


def _open(data: bytes, container: str) -> Any:
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    try:
        return decord.VideoReader(io.BytesIO(data), num_threads=1, fault_tol=_NO_INVENTED_FRAMES)
    except Exception as error:
        reason = _first_line(error)
        if "cannot find video stream" in str(error):
            reason = "it has no video stream"
        raise UndecodableError(f"cannot open this {container}: {reason}") from error


def _first_line(error: Exception) -> str:
    """Return decord's message without its references to decord's source code."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0].rpartition('.cc:')[2][:120]}"
