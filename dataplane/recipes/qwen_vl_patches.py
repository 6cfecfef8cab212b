"""The patches that Qwen-VL models take of an image: resize with Pillow, cut with one numpy copy, keep uint8.

Bit-equal to transformers' Qwen2VLImageProcessorPil with do_rescale=False and do_normalize=False, after the same
conversion to RGB. Videos are not here: an image is one frame, repeated `temporal_patch_size` times.

Axes: N patches in merge-block order, D = 3 * temporal_patch_size * patch_size^2 values of a patch.
"""

import math
from typing import Literal, Self

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_ASPECT_RATIO = 200
MAX_PIXELS = 1 << 26
_RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class QwenVLPatches(BaseModel):
    """The recipe, closed and range-checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kernel: Literal["qwen_vl_patches"]
    version: Literal[1]
    patch_size: int = Field(ge=1, le=64)
    merge_size: int = Field(ge=1, le=8)
    temporal_patch_size: int = Field(ge=1, le=8)
    min_pixels: int = Field(ge=1, le=MAX_PIXELS)
    max_pixels: int = Field(ge=1, le=MAX_PIXELS)
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"]

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}; swap or widen them")
        return self

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches for an image of this size. ValueError for an extreme aspect ratio."""
        factor = self.patch_size * self.merge_size
        rows, columns = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return rows // self.patch_size, columns // self.patch_size

    def shape(self, grid: tuple[int, int]) -> tuple[int, int]:
        """[N, D] of the result for a grid."""
        return grid[0] * grid[1], 3 * self.temporal_patch_size * self.patch_size**2

    def meta(self, grid: tuple[int, int]) -> dict[str, object]:
        """What a scheduler must know of the result."""
        return {"grid_thw": [1, *grid], "num_tokens": grid[0] * grid[1] // self.merge_size**2}

    def run(self, image: Image.Image, grid: tuple[int, int], out: np.ndarray) -> None:
        """Resize an RGB image to the grid and write its patches into `out` ([N, D] uint8, contiguous)."""
        patch, merge = self.patch_size, self.merge_size
        rows, columns = grid
        size = (columns * patch, rows * patch)
        if image.size != size:
            image = image.resize(size, _RESAMPLE[self.resample])
        planes = np.stack([np.asarray(band) for band in image.split()])
        blocks = planes.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
        target = out.reshape(*patches.shape[:5], self.temporal_patch_size, patch, patch)
        target[:] = patches[:, :, :, :, :, None]


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size an image is resized to: sides divisible by `factor`, area within the bounds, ratio about kept.

    As in Qwen2-VL (arXiv 2409.12191, section 2.1) and transformers' function of this name.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"aspect ratio {ratio:.4g} of {width}x{height}; wanted at most {MAX_ASPECT_RATIO}")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns
