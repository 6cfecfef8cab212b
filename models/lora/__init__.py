"""LoRA: small matrices beside the linear layers of a frozen model, which are trained in its place.

`settings.py` says what is adapted, `targets.py` finds those layers, `adapters.py` adds the matrices to megatron's and
torch's layers in any parallel layout and merges them for an export, and `peft_folder.py` writes them in the form of
PEFT. Experts have no adapters.

May import: compat, weights.
"""
