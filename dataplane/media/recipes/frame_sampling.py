"""Frame sampling: which frames of a video are used, by rate or by count, from a range of the video. Pure data and pure
arithmetic.

The rules are those of transformers' processors. `qwen2_vl` (also Qwen2.5-VL) takes a multiple of the temporal patch
size, evenly from the first frame on. `qwen3_vl` takes any number, evenly from the first frame to the last.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from dataplane.media.recipes.kernel import MAX_FRAMES, Recipe

MAX_SECONDS = 1e6
_TIME_SLACK = 1e-6
"""A tolerance in frames: at 10 frames a second, 0.3 s is frame 3, although 0.3 * 10 is less than 3 in floating
point."""


class _Range(Recipe, frozen=True, kw_only=True, tag_field="by"):
    rule: Literal["qwen2_vl", "qwen3_vl"]
    start_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 0.0
    end_s: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None = None
    """Only frames from `start_s` on and before `end_s` are used; None means the end of the video."""

    def __post_init__(self) -> None:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s {self.end_s} is not after start_s {self.start_s}")


class SampleByFps(_Range, frozen=True, kw_only=True, tag="fps"):
    """Sample a number of frames per second, within bounds."""

    fps: Annotated[float, Meta(gt=0, le=1000)]
    min_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)] = 4
    max_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)] = 768

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}; swap or widen them")


class SampleByCount(_Range, frozen=True, kw_only=True, tag="count"):
    """Sample a fixed number of frames."""

    num_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)]


Sampling = SampleByFps | SampleByCount
"""The field `by` says which of them it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """The frames that were sampled from one video."""

    indices: tuple[int, ...]
    fps: float
    """The frames per second of the sample."""
    video_fps: float
    total_num_frames: int

    @property
    def timestamps(self) -> list[float]:
        """The time of each frame in seconds: index / average rate, as in the processors."""
        return [index / self.video_fps for index in self.indices]

    def grid_timestamps(self, temporal: int) -> list[float]:
        """Return the time of each group of `temporal` frames in seconds: midway from first to last, as Qwen3-VL writes
        it into its prompt."""
        padded = [*self.indices, *[self.indices[-1]] * (-len(self.indices) % temporal)]
        times = [index / self.video_fps for index in padded]
        return [(times[at] + times[at + temporal - 1]) / 2 for at in range(0, len(times), temporal)]

    def meta(self) -> dict[str, Any]:
        """Return what a scheduler and an engine need to know about the sampled frames; JSON-safe."""
        return {
            "fps": self.fps,
            "video_fps": self.video_fps,
            "duration": self.total_num_frames / self.video_fps,
            "total_num_frames": self.total_num_frames,
            "frame_indices": list(self.indices),
            "timestamps": self.timestamps,
        }


def sample(sampling: Sampling, total: int, video_fps: float, multiple: int) -> FrameSampling:
    """Return which frames to use of a video of `total` frames. Raises ValueError if the range holds none."""
    first = math.ceil(sampling.start_s * video_fps - _TIME_SLACK)
    stop = total if sampling.end_s is None else min(total, math.ceil(sampling.end_s * video_fps - _TIME_SLACK))
    if first >= stop:
        raise ValueError(
            f"no frame from {sampling.start_s} s to {sampling.end_s or 'the end'}: it has {total / video_fps:.4g} s"
        )
    num_there = stop - first
    if sampling.rule == "qwen2_vl":
        indices = _sample_qwen2_vl(sampling, num_there, video_fps, multiple)
    else:
        indices = _sample_qwen3_vl(sampling, num_there, video_fps)
    return FrameSampling(
        indices=tuple(first + index for index in indices),
        fps=len(indices) / num_there * video_fps,
        video_fps=video_fps,
        total_num_frames=total,
    )


def _sample_qwen2_vl(sampling: Sampling, total: int, video_fps: float, multiple: int) -> list[int]:
    """Return the indices that Qwen2VLVideoProcessor.sample_frames would choose. If that fails because there are too few
    frames, return all indices."""
    if isinstance(sampling, SampleByCount):
        wanted = round(sampling.num_frames / multiple) * multiple
    else:
        most = math.floor(min(sampling.max_frames, total) / multiple) * multiple
        rate = total / video_fps * sampling.fps
        wanted = math.floor(min(max(rate, sampling.min_frames), most, total) / multiple) * multiple
    num_frames = wanted if 0 < wanted <= total else total
    return [at * total // num_frames for at in range(num_frames)]


def _sample_qwen3_vl(sampling: Sampling, total: int, video_fps: float) -> list[int]:
    """Return the indices that Qwen3VLVideoProcessor.sample_frames would choose."""
    if isinstance(sampling, SampleByCount):
        num_frames = sampling.num_frames
    else:
        rate = int(total / video_fps * sampling.fps)
        num_frames = min(max(rate, sampling.min_frames), sampling.max_frames, total)
    return np.linspace(0, total - 1, num_frames).round().astype(int).tolist()
