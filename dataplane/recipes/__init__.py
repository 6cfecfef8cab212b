"""Recipes: pure data that says how a derived object is made of a source, and the kernels that do it.

A recipe can only name a kernel of this table; nothing in it is imported, run or opened.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dataplane.errors import BadRequestError
from dataplane.recipes.qwen_vl_patches import QwenVLPatches

KERNELS = {"qwen_vl_patches": QwenVLPatches}


def parse_recipe(data: Mapping[str, Any]) -> QwenVLPatches:
    """The checked recipe. Raises BadRequestError that names every field that is unknown or out of range."""
    if not isinstance(data, Mapping):
        raise BadRequestError(f"a recipe is {type(data).__name__}; wanted a JSON object with a kernel")
    kernel = data.get("kernel")
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise BadRequestError(f"recipe.kernel is {kernel!r}; wanted one of {', '.join(KERNELS)}")
    try:
        return KERNELS[kernel].model_validate(dict(data))
    except ValidationError as error:
        problems = "; ".join(
            f"recipe.{'.'.join(map(str, item['loc'])) or kernel} is {repr(item['input'])[:60]}: {item['msg']}"
            for item in error.errors()
        )
        raise BadRequestError(problems) from error
