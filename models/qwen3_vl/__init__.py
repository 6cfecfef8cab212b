"""Qwen3-VL, dense: recipe (torch-free), config, model, mapping, tower."""
