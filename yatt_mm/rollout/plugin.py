"""The vLLM plugin of yatt-mm (entry point group vllm.general_plugins): weight transfer and classifiers.

vLLM calls `register` in each of its processes. Only names are registered: the process that needs a module imports it.
"""

BACKEND = "yatt_shm"
"""The name of the weight-transfer engine that reads shared-memory segments."""

CLASSIFIERS = ("InternVLForSequenceClassification", "Qwen2_5_VLForSequenceClassification")
"""The names of the classes in `classifier_models`, which vLLM 0.32 does not have."""


def register() -> None:
    """Register `yatt_shm` and the classifiers in this process. vLLM may call it more than once."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "yatt_mm.rollout.weight_transfer", "ShmWeightTransferEngine"
        )
    for name in CLASSIFIERS:
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"yatt_mm.rollout.classifier_models:{name}")
