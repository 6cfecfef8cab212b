"""Recipes by which the data plane makes a model's media, read from the model's Hugging Face folder. No torch here.

`media_recipes.py` loads the recipes of a model by kind of medium, `qwen_vl_recipe.py` is the Qwen-VL family's, and
`processor_file.py` reads the folder's image processor.

May import: models.
"""
