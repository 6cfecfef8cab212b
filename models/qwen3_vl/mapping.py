"""The weight table of Qwen3-VL: megatron's name, the Hugging Face names, and how the tensor is cut."""

from __future__ import annotations

from transformers import Qwen3VLConfig

from models.weights.checkpoint_files import CheckpointFiles
from models.weights.load import Rule
from models.weights.rules import Prefixes, end_rules, layer_rules


def rules(hf_config: Qwen3VLConfig, files: CheckpointFiles) -> list[Rule]:
    """Return the rules between this checkpoint's tensors and the megatron model's parameters, with the name prefixes
    that the checkpoint uses."""
    prefixes = Prefixes.found_in(files.names, "Qwen3-VL")
    is_head_tied = bool(hf_config.tie_word_embeddings)
    return end_rules(prefixes, files.names, is_head_tied=is_head_tied) + layer_rules(prefixes)
