"""InternVL3 and 3.5 in Hugging Face's format: recipe (torch-free), config, model, mapping, tower.

May import: compat, decoder, layout, models, recipes, sequence, vision, weights.
"""
