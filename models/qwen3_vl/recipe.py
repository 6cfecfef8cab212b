"""The recipe of Qwen3-VL's images, which is that of the whole Qwen-VL family. Torch-free."""

from models.recipes.qwen_vl_recipe import IMAGE_MARKS, patch_recipe, pixel_affine

__all__ = ["IMAGE_MARKS", "patch_recipe", "pixel_affine"]
