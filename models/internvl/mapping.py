"""The weight table of InternVL: megatron's name, the Hugging Face names, and how the tensor is cut."""

from __future__ import annotations

from transformers import InternVLConfig

from models.weights.checkpoint_files import CheckpointFiles
from models.weights.load import Rule
from models.weights.rules import Prefixes, end_rules, layer_rules

TOWER_PREFIXES = ("model.", "")
"""The prefixes that the names of the vision tower's and the projector's tensors may have in a checkpoint."""


def rules(hf_config: InternVLConfig, files: CheckpointFiles) -> list[Rule]:
    """Return the rules between this checkpoint's tensors and the megatron model's parameters, with the name prefixes
    that the checkpoint uses."""
    prefixes = Prefixes.found_in(
        files.names, "InternVL", visual=TOWER_PREFIXES, in_visual="vision_tower.embeddings.cls_token"
    )
    is_head_tied = bool(hf_config.tie_word_embeddings)
    return end_rules(prefixes, files.names, is_head_tied=is_head_tied) + layer_rules(prefixes)
