"""Algorithms as pure functions, and the table that says which algorithm is made of which (`table.py`).

`advantages.py` and `token_weights.py` are for controllers, `losses.py`, `correction.py` and `gae.py` for training
ranks, which give losses `loss_inputs.py`; `settings.py` has what they all read. No file imports torch when it is
loaded. The keys are in `yatt_mm.config.algorithm_section`.

May import: nothing.
"""
