"""Qwen2.5-VL's tensors: megatron's name, the Hugging Face names, and how the tensor is cut. One table."""

from __future__ import annotations

from collections.abc import Collection

from transformers import Qwen2_5_VLConfig

from models.weights import Rule

DECODER = "language_model.decoder.layers.{layer}."


def rules(hf_config: Qwen2_5_VLConfig, checkpoint_names: Collection[str]) -> list[Rule]:
    """The table, with the prefixes that this checkpoint uses (they moved between transformers releases)."""
    is_head_tied = bool(hf_config.tie_word_embeddings)
    text = _prefix(
        checkpoint_names, ("model.language_model.", "language_model.model.", "model."), "embed_tokens.weight"
    )
    visual = _prefix(checkpoint_names, ("model.visual.", "visual."), "patch_embed.proj.weight")
    layer = text + "layers.{layer}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    qkv = [attention + part for part in ("q_proj.", "k_proj.", "v_proj.")]
    embedding, head = text + "embed_tokens.weight", "lm_head.weight"
    copies = [head] if is_head_tied and head in checkpoint_names else []
    return [
        Rule("language_model.embedding.word_embeddings.weight", [embedding], "vocab", copies=copies),
        # the last pipeline stage has its own copy of a tied head: loaded, not exported
        Rule("language_model.output_layer.weight", [embedding if is_head_tied else head], "vocab", not is_head_tied),
        Rule("language_model.decoder.final_layernorm.weight", [text + "norm.weight"], "rep"),
        Rule(DECODER + "input_layernorm.weight", [layer + "input_layernorm.weight"], "rep"),
        Rule(DECODER + "pre_mlp_layernorm.weight", [layer + "post_attention_layernorm.weight"], "rep"),
        Rule(DECODER + "self_attention.linear_qkv.weight", [name + "weight" for name in qkv], "qkv"),
        Rule(DECODER + "self_attention.linear_qkv.bias", [name + "bias" for name in qkv], "qkv"),
        Rule(DECODER + "self_attention.linear_proj.weight", [attention + "o_proj.weight"], "row"),
        Rule(DECODER + "mlp.linear_fc1.weight", [mlp + "gate_proj.weight", mlp + "up_proj.weight"], "gated"),
        Rule(DECODER + "mlp.linear_fc2.weight", [mlp + "down_proj.weight"], "row"),
        Rule("vision_model.visual.{rest}", [visual + "{rest}"], "rep"),
    ]


def _prefix(names: Collection[str], prefixes: tuple[str, ...], tensor: str) -> str:
    for prefix in prefixes:
        if prefix + tensor in names:
            return prefix
    raise ValueError(
        f"no tensor {' or '.join(prefix + tensor for prefix in prefixes)} in the checkpoint; "
        "model.path must hold the weights of a whole Qwen2.5-VL model"
    )
