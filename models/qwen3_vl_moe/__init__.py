"""Qwen3-VL with experts: recipe (torch-free), config, model, mapping, tower."""
