"""The recipe of InternVL's images: square tiles, and the tokens around an image's tokens. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.recipes.processor_file import pixel_affine, read_processor, resample_filter
from models.registry import read_config

__all__ = ["IMAGE_MARKS", "patch_recipe", "pixel_affine"]

IMAGE_MARKS = ("<img>", "</img>")
"""The tokens before and after an image's tokens. The chat template writes one placeholder, and the processor adds these
around the expanded ones."""


def patch_recipe(model_dir: Path) -> dict[str, Any]:
    """Return the recipe that turns an image into uint8 tiles [num_tiles, C, S, S].

    An image is always cut into tiles, as in InternVLProcessor, whatever the image processor's file says. Raises
    ValueError for tiles that are not square, or not those of the vision tower.
    """
    processor, config = read_processor(model_dir), read_config(model_dir)
    vision, size = config["vision_config"], processor["size"]
    sides = {size.get("height"), size.get("width"), *_pair(vision["image_size"])}
    if len(sides) != 1 or None in sides:
        raise ValueError(
            f"{model_dir}: the image processor's size is {size} and vision_config.image_size {vision['image_size']}; "
            "wanted one square, the same in both: tiles are what the vision tower has positions for"
        )
    return {
        "kernel": "tiles",
        "version": 1,
        "tile_size": sides.pop(),
        "patch_size": _pair(vision["patch_size"])[0],
        "merge_size": round(1 / config.get("downsample_ratio", 0.5)),
        "min_tiles": processor.get("min_patches", 1),
        "max_tiles": processor.get("max_patches", 12),
        "resample": resample_filter(processor.get("resample", 3)),
    }


def _pair(value: int | list[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
