"""Prepares this process for megatron-core: on the CPU the import hook, without TE or Apex an optimizer of ours.

Everything else reaches megatron through `models.compat.megatron_core`, which calls `prepare` before its first import.
"""

from __future__ import annotations

import logging
import warnings


def prepare() -> None:
    """Make `import megatron.core` work here. Call it before anything imports megatron.core; twice is harmless."""
    import torch

    if not torch.cuda.is_available():
        from models.compat import megatron_cpu

        megatron_cpu.install()
    from models.compat import adam

    # It tells at import that TE, Apex and fused kernels are missing: known, and repeated by every rank.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    # It calls collectives and checkpoint helpers by names that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    adam.install()
