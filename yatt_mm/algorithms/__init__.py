"""Advantages (no torch) and losses as pure functions."""
