"""The main module of the processes that vLLM starts. It imports what they need in the way in which large libraries are
imported: vLLM itself would do so with the search for garbage on, after the main module of the process that starts them,
which they do not need."""

import models  # installs the import hooks that CPU builds of torch need
from yatt_mm.common.large_imports import large_imports

with large_imports():
    import vllm.v1.engine.core

__all__ = ["models", "vllm"]
