"""The kernel `frames`: the sampled frames of a video without further processing, as [T, height, width, 3] uint8."""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.frame_sampling import Sampling, sample
from dataplane.media.recipes.kernel import RESAMPLE, Plan, Resample, VideoRecipe
from dataplane.media.recipes.rgb import MAX_SIDE
from dataplane.media.videos import Video


class Frames(VideoRecipe, frozen=True, kw_only=True):
    """The recipe of the kernel `frames`. Unknown fields and values out of range are refused."""

    kernel: Literal["frames"]
    version: Literal[1]
    sampling: Sampling
    multiple: Annotated[int, Meta(ge=1, le=8)] = 1
    """The rule `qwen2_vl` rounds the number of frames to a multiple of this number: a model's temporal patch size."""
    height: Annotated[int, Meta(ge=1, le=MAX_SIDE)] | None = None
    width: Annotated[int, Meta(ge=1, le=MAX_SIDE)] | None = None
    """The width in pixels to which frames are resized, together with the height. None leaves frames as they are."""
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            raise ValueError(f"height is {self.height} and width {self.width}; give both or none")

    def plan(self, source: Video) -> Plan:
        """Return the plan for the sampled frames. Raises ValueError if the range holds none."""
        taken = sample(self.sampling, source.num_frames, source.fps, self.multiple)
        height, width = self.height or source.height, self.width or source.width
        shape = (len(taken.indices), height, width, 3)

        def write(out: np.ndarray) -> None:
            for target, frame in zip(out.reshape(shape), source.frames(taken.indices), strict=True):
                if frame.shape == target.shape:
                    target[:] = frame
                else:
                    target[:] = np.asarray(Image.fromarray(frame).resize((width, height), RESAMPLE[self.resample]))

        return Plan(
            shape=shape,
            meta=taken.meta(),
            pixel_bytes=len(taken.indices) * source.height * source.width * 3,
            write=write,
        )
