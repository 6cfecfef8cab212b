"""Recipes and kernels. A recipe is pure data that says how to make a derived object from a source. A kernel is the code
that makes it.

A recipe only names a kernel of the table below. Nothing in a recipe is imported, run or opened. A new kernel is a
module here plus a line in the table.

May import: core, media.
"""

from collections.abc import Mapping
from typing import Any

from dataplane.core.errors import BadRequestError
from dataplane.media.recipes.frames import Frames
from dataplane.media.recipes.kernel import Kernel
from dataplane.media.recipes.parsing import parse
from dataplane.media.recipes.qwen_vl_patches import QwenVLPatches
from dataplane.media.recipes.qwen_vl_video_patches import QwenVLVideoPatches
from dataplane.media.recipes.rgb import Rgb
from dataplane.media.recipes.thumbnails import Thumbnail, VideoThumbnail
from dataplane.media.recipes.tiles import Tiles

AnyKernel = QwenVLPatches | QwenVLVideoPatches | Tiles | Frames | Rgb | Thumbnail | VideoThumbnail
KERNELS: Mapping[str, type[AnyKernel]] = {
    "qwen_vl_patches": QwenVLPatches,
    "qwen_vl_video_patches": QwenVLVideoPatches,
    "tiles": Tiles,
    "frames": Frames,
    "rgb": Rgb,
    "thumbnail": Thumbnail,
    "video_thumbnail": VideoThumbnail,
}
FOR_PEOPLE = ("thumbnail", "video_thumbnail")
"""The kernels whose results no model sees."""
VERSION = 1
"""The version of all present kernels. If the results of a kernel change, the new kernel gets the next number, and the
old one stays beside it."""


def parse_recipe(data: Mapping[str, Any]) -> Kernel:
    """Check a recipe, and return it as the kernel that runs it. Raises BadRequestError that names every field that is
    unknown or out of range."""
    if not isinstance(data, Mapping):
        raise BadRequestError(f"a recipe is {type(data).__name__}; wanted a JSON object with a kernel")
    kernel = data.get("kernel")
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise BadRequestError(f"recipe.kernel is {kernel!r}; wanted one of {', '.join(KERNELS)}")
    if (version := data.get("version", VERSION)) != VERSION:
        raise BadRequestError(
            f"recipe.version is {repr(version)[:60]}; this node runs version {VERSION} of {kernel}: its other versions "
            "give other bytes; ask a node that has it, or make the recipe anew for this version"
        )
    return parse(KERNELS[kernel], data)
