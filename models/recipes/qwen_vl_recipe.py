"""The recipe of the Qwen-VL family's images, and the affine map for users of the patches.

It is read from the folder's preprocessor_config.json. Torch-free, because rollout and the controllers' start use it
too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.recipes.processor_file import pixel_affine, read_processor, resample_filter

__all__ = ["IMAGE_MARKS", "patch_recipe", "pixel_affine"]

IMAGE_MARKS: tuple[str, ...] = ()
"""Empty, because the chat template itself writes the tokens around an image."""


def patch_recipe(model_dir: Path) -> dict[str, Any]:
    """Return the recipe that turns an image into uint8 patches [num_patches, C * T * P * P]."""
    config = read_processor(model_dir)
    sizes = config.get("size") or {}
    return {
        "kernel": "qwen_vl_patches",
        "version": 1,
        "patch_size": config["patch_size"],
        "merge_size": config["merge_size"],
        "temporal_patch_size": config["temporal_patch_size"],
        "min_pixels": config.get("min_pixels") or sizes["shortest_edge"],
        "max_pixels": config.get("max_pixels") or sizes["longest_edge"],
        "resample": resample_filter(config.get("resample", 3)),
    }
