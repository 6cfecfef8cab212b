"""Qwen3-VL, dense: recipe (torch-free), config, model, mapping, tower.

May import: compat, decoder, layout, models, recipes, sequence, vision, weights.
"""
