"""What vLLM loads in each of its processes (entry point group vllm.general_plugins): our weight transfer, our models.

Only names them: the modules behind are imported by the worker that wants them.
"""

BACKEND = "yatt_shm"
"""Name of the weight-transfer engine that reads shared-memory segments."""

CLASSIFIERS = ("InternVLForSequenceClassification", "Qwen2_5_VLForSequenceClassification")
"""Classes of `classifier_models`, which vLLM has no like of."""


def register() -> None:
    """Make `yatt_shm` and the classifiers known to this process; vLLM may call it more than once."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "yatt_mm.rollout.weight_transfer", "ShmWeightTransferEngine"
        )
    for name in CLASSIFIERS:
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"yatt_mm.rollout.classifier_models:{name}")
