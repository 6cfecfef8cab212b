"""Qwen2.5-VL: recipe (torch-free), config, model, mapping. The vision tower is Hugging Face's own module.

May import: compat, decoder, layout, models, recipes, sequence, vision, weights.
"""
