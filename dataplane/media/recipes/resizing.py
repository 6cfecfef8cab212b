"""The sizes to which Qwen-VL processors resize. Pure arithmetic, equal to transformers' `smart_resize` functions."""

import math

MAX_ASPECT_RATIO = 200


def check_bounds(min_pixels: int, max_pixels: int) -> None:
    """Raise ValueError unless `min_pixels` is at most `max_pixels`."""
    if min_pixels > max_pixels:
        raise ValueError(f"min_pixels {min_pixels} is above max_pixels {max_pixels}; swap or widen them")


def resize_image(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return height and width that are divisible by `factor`, with an area within the bounds and nearly the same ratio.

    The rule is that of Qwen2-VL (arXiv 2409.12191, section 2.1). Raises ValueError for an extreme aspect ratio.
    """
    return _resize(1, 1, height, width, factor, min_pixels, max_pixels)


def resize_video(
    num_frames: int, temporal: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the height and width of each frame of a video. The rule is that of `resize_image`, but the bounds apply to
    all frames together, as in Qwen3-VL."""
    num_frames = max(num_frames, temporal)  # a shorter video is repeated up to there
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _resize(num_frames, round(num_frames / temporal) * temporal, height, width, factor, min_pixels, max_pixels)


def _resize(
    num_frames: int, rounded_frames: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"aspect ratio {ratio:.4g} of {width}x{height}; wanted at most {MAX_ASPECT_RATIO}")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = num_frames * height * width
    if rounded_frames * rows * columns > max_pixels:
        shrink = math.sqrt(pixels / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded_frames * rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / pixels)
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns
