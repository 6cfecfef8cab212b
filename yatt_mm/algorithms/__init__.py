"""Algorithms as pure functions: advantages (`advantages.py`, no torch) and policy losses (`losses.py`).

A new advantage or loss is a function here. `yatt_mm.control.controller` calls the advantages, `yatt_mm.training` the
losses, and the keys are in the section `algorithm` of `yatt_mm.config.sections`.

May import: nothing.
"""
