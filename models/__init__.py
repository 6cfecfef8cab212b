"""Vision-language models on Megatron-core, built from and exported to Hugging Face folders.

Importing this package installs the import hooks of `models.compat` and nothing else: no torch, no megatron.
What it leaves out: training (yatt_mm) and where pixels come from (dataplane); it emits recipes as data.

A new family is a folder that gives `FAMILY` (`family.py`), a line in `registry.py`, its vision tower in `flops.py` and,
if it takes videos, its rules in `recipes/media_recipes.py`.

May import: compat, decoder, layout, sequence, vision, weights.
"""

from models import compat

compat.install()
