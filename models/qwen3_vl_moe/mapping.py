"""The weight table of Qwen3-VL-MoE: the rules of Qwen3-VL, a router, and the experts in one of three forms."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3VLMoeConfig

from models.qwen3_vl_moe.config import has_experts
from models.weights.checkpoint_files import CheckpointFiles
from models.weights.expert_stack import ExpertLayout
from models.weights.load import Rule
from models.weights.rules import DECODER, Prefixes, end_rules, layer_rules


def rules(hf_config: Qwen3VLMoeConfig, files: CheckpointFiles) -> list[Rule]:
    """Return the table, with the prefixes and the form of the experts that this checkpoint uses."""
    text: Any = hf_config.text_config
    prefixes = Prefixes.found_in(files.names, "Qwen3-VL-MoE")
    mlp, experts = prefixes.layer + "mlp.", prefixes.layer + "mlp.experts."
    layout = expert_layout(text, files, experts.format(layer=has_experts(text).index(True)))
    joined = {"gate_up": [experts + "gate_up_proj"], "down": [experts + "down_proj"]}
    if layout == "named":
        numbers = range(text.num_experts)
        joined["gate_up"] = [f"{experts}{e}.{part}_proj.weight" for e in numbers for part in ("gate", "up")]
        joined["down"] = [f"{experts}{e}.down_proj.weight" for e in numbers]
    return [
        *end_rules(prefixes, files.names, is_head_tied=bool(hf_config.tie_word_embeddings)),
        *layer_rules(prefixes),
        Rule(DECODER + "mlp.router.weight", [mlp + "gate.weight"], "rep"),
        Rule(DECODER + "mlp.experts.linear_fc1.weight", joined["gate_up"], "gated", experts=layout),
        Rule(DECODER + "mlp.experts.linear_fc2.weight", joined["down"], "row", experts=layout),
    ]


def expert_layout(text: Any, files: CheckpointFiles, prefix: str) -> ExpertLayout:
    """Return the form of the experts whose tensors begin with `prefix`. It follows from their names, or else from their
    shapes.

    One of the two tensors may be square, but never both, so together they always decide. Raises ValueError for shapes
    that fit neither form.
    """
    if f"{prefix}0.down_proj.weight" in files.names:
        return "named"
    num_experts, inner, outer = text.num_experts, text.moe_intermediate_size, text.hidden_size
    found = (files.shape(prefix + "gate_up_proj"), files.shape(prefix + "down_proj"))
    forms: dict[ExpertLayout, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "in_out": ((num_experts, outer, 2 * inner), (num_experts, inner, outer)),
        "out_in": ((num_experts, 2 * inner, outer), (num_experts, outer, inner)),
    }
    for layout, wanted in forms.items():
        if found == wanted:
            return layout
    raise ValueError(
        f"{prefix}gate_up_proj and down_proj of the checkpoint have the shapes {found[0]} and {found[1]} where "
        f"config.json says {forms['in_out']} or {forms['out_in']}; the folder's config and weights do not belong "
        "together"
    )
