"""Qwen3-VL with experts: recipe (torch-free), config, model, mapping, tower.

May import: compat, decoder, layout, models, qwen3_vl, recipes, sequence, weights.
"""
