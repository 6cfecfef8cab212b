"""What vLLM loads in each of its processes (entry point group vllm.general_plugins): our weight-transfer engine.

Only names it: the module behind it is imported by the worker that wants it.
"""

BACKEND = "yatt_shm"
"""Name of the weight-transfer engine that reads shared-memory segments."""


def register() -> None:
    """Make `yatt_shm` known to this process; vLLM may call it more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "yatt_mm.rollout.weight_transfer", "ShmWeightTransferEngine"
        )
