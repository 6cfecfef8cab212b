"""Reward functions (`functions.py`), how the configured one is loaded, and the worker processes that call it.

May import: common, dataplane.client, protocol.
"""
