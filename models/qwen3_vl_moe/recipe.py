"""Qwen3-VL-MoE takes its pixels as the whole family does. Torch-free."""

from models.qwen_vl_recipe import patch_recipe, pixel_affine

__all__ = ["patch_recipe", "pixel_affine"]
