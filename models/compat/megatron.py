"""Prepares this process for megatron-core: the import hook on the CPU, and our optimizer if neither Transformer Engine
nor Apex is installed.

All other code gets megatron through `models.compat.megatron_core`, which calls `prepare` before its first import.
"""

from __future__ import annotations

import logging
import warnings


def prepare() -> None:
    """Make `import megatron.core` work on this machine. Call it before anything imports megatron.core. Calling it twice
    is harmless."""
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
    _name_missing_kernel()


def _name_missing_kernel() -> None:
    """Define in the router's module the name of a Transformer Engine kernel, which is unbound there without Transformer
    Engine."""
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
