"""Vision-language models on Megatron-core. They are built from Hugging Face folders and exported to them.

Importing this package installs the import hooks of `models.compat` and nothing else: no torch, no megatron. Training is
in `yatt_mm`, and pixels come from `dataplane`; this package gives recipes as data.

A new family is a folder that gives `FAMILY` (`family.py`), a line in `registry.py`, its vision tower in `flops.py` and,
if it takes videos, its rules in `recipes/media_recipes.py`.

May import: compat, decoder, layout, lora, sequence, vision, weights.
"""

from models import compat

compat.install()
