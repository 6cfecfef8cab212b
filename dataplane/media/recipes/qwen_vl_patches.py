"""The kernel `qwen_vl_patches`: patches of an image for Qwen-VL models. It resizes with Pillow, cuts with one numpy
copy, and keeps uint8.

The result is bit-equal to transformers' Qwen2VLImageProcessorPil with do_rescale=False and do_normalize=False, after
the same conversion to RGB. An image is one frame, repeated `temporal_patch_size` times. Videos have their own kernel.

Axes: N patches in merge-block order, D = 3 * temporal_patch_size * patch_size^2 values of a patch.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.kernel import MAX_PIXELS, RESAMPLE, Medium, Plan, Recipe, Resample
from dataplane.media.recipes.patches import repeat_frame, write_frame
from dataplane.media.recipes.resizing import check_bounds, resize_image


class QwenVLPatches(Recipe, frozen=True, kw_only=True):
    """The recipe of the kernel `qwen_vl_patches`. Unknown fields and values out of range are refused."""

    medium: ClassVar[Medium] = "image"

    kernel: Literal["qwen_vl_patches"]
    version: Literal[1]
    patch_size: Annotated[int, Meta(ge=1, le=64)]
    merge_size: Annotated[int, Meta(ge=1, le=8)]
    temporal_patch_size: Annotated[int, Meta(ge=1, le=8)]
    min_pixels: Annotated[int, Meta(ge=1, le=MAX_PIXELS)]
    max_pixels: Annotated[int, Meta(ge=1, le=MAX_PIXELS)]
    resample: Resample

    def __post_init__(self) -> None:
        check_bounds(self.min_pixels, self.max_pixels)

    def plan(self, source: Image.Image) -> Plan:
        """Return the plan for the patches of an RGB image. Raises ValueError for an extreme aspect ratio."""
        patch, merge = self.patch_size, self.merge_size
        height, width = resize_image(source.height, source.width, patch * merge, self.min_pixels, self.max_pixels)
        rows, columns = height // patch, width // patch

        def write(out: np.ndarray) -> None:
            image = source
            if image.size != (width, height):
                image = image.resize((width, height), RESAMPLE[self.resample])
            write_frame(image, out, patch, merge, self.temporal_patch_size, 0)
            repeat_frame(out, patch, self.temporal_patch_size, 0, range(1, self.temporal_patch_size))

        return Plan(
            shape=(rows * columns, 3 * self.temporal_patch_size * patch**2),
            meta={"grid_thw": [1, rows, columns], "num_tokens": rows * columns // merge**2},
            pixel_bytes=source.width * source.height * 3,
            write=write,
        )
