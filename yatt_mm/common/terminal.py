"""Texts of models and data sets in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def put(console: Console, name: str, text: str) -> None:
    """Print a text that a model or a data set gave, with a name before it: as it is, but without characters that
    control the terminal."""
    plain = "".join(char for char in text if char.isprintable() or char in "\n\t").replace("\n", "\n  ")
    console.print(Text.assemble("  ", (f"{name} ", "cyan") if name else "", plain), soft_wrap=True)
