"""Vision-language models on Megatron-core, built from and exported to Hugging Face folders.

Importing this package installs the import hooks of `models.compat` and nothing else: no torch, no megatron.
What it leaves out: training (yatt_mm) and where pixels come from (dataplane); it emits recipes as data.

May import: compat, decoder, layout, sequence, vision, weights.
"""

from models import compat

compat.install()
