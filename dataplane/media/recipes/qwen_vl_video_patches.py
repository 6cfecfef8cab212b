"""The kernel `qwen_vl_video_patches`: patches of a video for Qwen-VL models. It samples, resizes with Pillow, cuts
frame by frame, and keeps uint8.

Sampling, sizes and order are those of transformers' Qwen2VLVideoProcessor (`bounds` per frame; also Qwen2.5-VL) and
Qwen3VLVideoProcessor (`bounds` per video). An odd frame at the end is repeated as they do. The resize is Pillow's where
theirs is torchvision's; a test states the difference.

Axes: N patches in merge-block order, T x rows x columns; D = 3 * temporal_patch_size * patch_size^2 values of a patch.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.frame_sampling import Sampling, sample
from dataplane.media.recipes.kernel import RESAMPLE, Plan, Resample, VideoRecipe
from dataplane.media.recipes.patches import repeat_frame, write_frame
from dataplane.media.recipes.resizing import check_bounds, resize_image, resize_video
from dataplane.media.videos import Video

MAX_VIDEO_PIXELS = 1 << 30


class QwenVLVideoPatches(VideoRecipe, frozen=True, kw_only=True):
    """The recipe of the kernel `qwen_vl_video_patches`. Unknown fields and values out of range are refused."""

    kernel: Literal["qwen_vl_video_patches"]
    version: Literal[1]
    sampling: Sampling
    patch_size: Annotated[int, Meta(ge=1, le=64)]
    merge_size: Annotated[int, Meta(ge=1, le=8)]
    temporal_patch_size: Annotated[int, Meta(ge=1, le=8)]
    bounds: Literal["frame", "video"]
    """The scope of `min_pixels` and `max_pixels`: each frame (Qwen2.5-VL) or all frames together (Qwen3-VL)."""
    min_pixels: Annotated[int, Meta(ge=1, le=MAX_VIDEO_PIXELS)]
    max_pixels: Annotated[int, Meta(ge=1, le=MAX_VIDEO_PIXELS)]
    max_video_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    """The limit for the visual tokens of the whole video. It is the setting of this name of transformers' processors,
    with cap_pixels_per_frame. None means no limit."""
    resample: Resample

    def __post_init__(self) -> None:
        check_bounds(self.min_pixels, self.max_pixels)

    def plan(self, source: Video) -> Plan:
        """Return the plan for the patches of the sampled frames. Raises ValueError for an extreme aspect ratio, or a
        range without frames."""
        patch, merge, temporal = self.patch_size, self.merge_size, self.temporal_patch_size
        taken = sample(self.sampling, source.num_frames, source.fps, temporal)
        num_frames = len(taken.indices)
        height, width = self.size(num_frames, source.height, source.width)
        times, rows, columns = -(-num_frames // temporal), height // patch, width // patch

        def write(out: np.ndarray) -> None:
            grids = out.reshape(times, -1)
            for at, frame in enumerate(source.frames(taken.indices)):
                image = Image.fromarray(frame)
                if image.size != (width, height):
                    image = image.resize((width, height), RESAMPLE[self.resample])
                write_frame(image, grids[at // temporal], patch, merge, temporal, at % temporal)
            if num_missing := -num_frames % temporal:
                last = temporal - num_missing - 1
                repeat_frame(grids[-1], patch, temporal, last, range(last + 1, temporal))

        meta = {
            **taken.meta(),
            "grid_thw": [times, rows, columns],
            "num_tokens": times * rows * columns // merge**2,
            "grid_timestamps": taken.grid_timestamps(temporal),
            "second_per_grid_t": temporal / taken.fps,
        }
        return Plan(
            shape=(times * rows * columns, 3 * temporal * patch**2),
            meta=meta,
            pixel_bytes=num_frames * source.height * source.width * 3,
            write=write,
        )

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to which frames are resized."""
        factor, temporal = self.patch_size * self.merge_size, self.temporal_patch_size
        least, most = self.min_pixels, self.max_pixels
        if self.bounds == "frame":
            if self.max_video_tokens is not None:
                budget = int(self.max_video_tokens * factor * factor * 0.9)
                most = max(min(most, budget * temporal // num_frames), int(least * 1.05))
            return resize_image(height, width, factor, least, most)
        if self.max_video_tokens is not None:
            per_frame = min(self.max_video_tokens * factor * factor, most // num_frames)
            most = max(per_frame, int(least * 1.05)) * num_frames
        return resize_video(num_frames, temporal, height, width, factor, least, most)
