"""Algorithms as pure functions: advantages (`advantages.py`, no torch) and policy losses (`losses.py`).

May import: nothing.
"""
