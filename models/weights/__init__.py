"""Weights: loading a Hugging Face checkpoint into any parallel layout, and exporting it again.

A table of rules per family (`models/<family>/mapping.py`, shared rows in `rules.py`) maps names. `load.py` loads by it,
`export.py` exports by the same table, `slicing.py` knows how each kind of tensor is cut over ranks, `expert_stack.py`
handles experts, and `checkpoint_files.py` reads and writes safetensors files.

May import: compat.
"""
