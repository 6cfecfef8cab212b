"""Imports of large libraries, which make hundreds of thousands of objects that stay."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

HIDDEN = ("scipy", "sklearn")
"""The packages that transformers and vLLM load where they are installed, for losses of detectors, assisted generation
and sound. No engine and no rank needs them."""


@contextmanager
def large_imports() -> Iterator[None]:
    """Import vLLM or transformers in a `with` block, in three fifths of the time: without search for garbage, and as if
    `HIDDEN` were not installed."""
    modules = cast(dict[str, Any], sys.modules)
    hidden = [name for name in HIDDEN if name not in modules]
    modules |= dict.fromkeys(hidden)  # what is None here cannot be imported
    try:
        with kept_objects():
            yield
    finally:
        for name in hidden:
            del modules[name]


@contextmanager
def kept_objects() -> Iterator[None]:
    """Do not collect garbage in a `with` block that makes objects that stay, and never look at them later.

    Python would search all objects for garbage again and again while they are made: a fifth of the time that vLLM's
    import takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else some libraries would report all that they made as leaks
        if was_enabled:
            gc.enable()
