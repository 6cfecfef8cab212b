"""Qwen3-VL-MoE takes its pixels as the whole family does. Torch-free."""

from models.recipes.qwen_vl_recipe import IMAGE_MARKS, patch_recipe, pixel_affine

__all__ = ["IMAGE_MARKS", "patch_recipe", "pixel_affine"]
