"""Reads the frames of a video with decord 0.6, which brings FFmpeg 4.1 of 2018. Only worker processes import this file.

It is for recipes that name it: to make again what was made with it, or to compare. A frame that decord would have to
invent is an error.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import decord
import numpy as np

from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits

_CHUNK_BYTES = 64 << 20
# decord counts frames that it replaces by a neighbour as faults; 0 would turn this check off
_NO_INVENTED_FRAMES = 1e-9

decord.logging.set_level(decord.logging.QUIET)


class DecordFrames:
    """The frames of one video. The constructor and `frames` raise UndecodableError."""

    def __init__(self, data: bytes, container: str, limits: MediaLimits) -> None:
        self._format = container
        self._reader = _open(data, container)
        self._chunk = 1  # frames at a time; one until their size is known
        self.num_frames = len(self._reader)
        if self.num_frames > limits.max_video_frames:
            raise UndecodableError(f"{self.num_frames} frames; at most {limits.max_video_frames} are looked at")
        self.fps = float(self._reader.get_avg_fps())
        """The frames per second; the average, if the rate is not steady."""

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frame [height, width, 3] uint8 of each index. Ascending indices are the fastest."""
        at = 0
        while at < len(indices):
            try:
                batch = self._reader.get_batch(list(indices[at : at + self._chunk])).asnumpy()
            except Exception as error:  # decord's own error, RuntimeError, IndexError, ...
                raise UndecodableError(f"truncated or corrupt {self._format}: {_first_line(error)}") from error
            yield from batch
            at += len(batch)
            self._chunk = max(1, _CHUNK_BYTES // batch[0].nbytes)


def _open(data: bytes, container: str) -> Any:
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
