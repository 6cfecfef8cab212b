"""Imports of large libraries, which make hundreds of thousands of objects that stay."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Do not collect garbage in a `with` block that imports a large library, and never look at its objects later.

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
