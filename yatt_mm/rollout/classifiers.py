"""vLLM arguments for a sequence classifier: the family's model class, and a head that reads the last token.

Left out: the model classes that vLLM 0.32 does not have (`classifier_models`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import PoolerConfig

from models.registry import read_config
from yatt_mm.rollout.engine_types import EngineConfig

ARCHITECTURES = {
    "internvl": "InternVLForSequenceClassification",
    "qwen2_5_vl": "Qwen2_5_VLForSequenceClassification",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""[model_type] Name of the class in vLLM's registry. The name in the folder's config is not used."""


def architecture(hf_config: dict[str, Any]) -> str:
    """Return the name of the vLLM class that becomes the classifier."""
    return ARCHITECTURES[hf_config["model_type"]]


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments that a classifier needs in addition to those of every engine.

    They set the number of labels in two configs, because vLLM may read it from either.
    """
    labels = {"num_labels": config.num_labels}
    name = architecture(read_config(Path(config.model_dir)))
    return {
        "runner": "pooling",
        "convert": "classify",
        "hf_overrides": {"architectures": [name], **labels, "text_config": labels},
        "pooler_config": PoolerConfig(seq_pooling_type="LAST"),
    }
