"""What vLLM is told to make a classifier of a model folder: the family's model, and the head at the last token.

Left out: the classes behind the architectures (`classifier_models`).
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
"""model_type -> name of the class in vLLM's registry, whatever the folder calls it."""


def architecture(hf_config: dict[str, Any]) -> str:
    """The class that vLLM makes a classifier of."""
    return ARCHITECTURES[hf_config["model_type"]]


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Beside what every engine is told; vLLM looks for the number of labels in either of two configs."""
    labels = {"num_labels": config.num_labels}
    name = architecture(read_config(Path(config.model_dir)))
    return {
        "runner": "pooling",
        "convert": "classify",
        "hf_overrides": {"architectures": [name], **labels, "text_config": labels},
        "pooler_config": PoolerConfig(seq_pooling_type="LAST"),
    }
