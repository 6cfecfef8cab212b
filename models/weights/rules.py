"""Rules that the weight tables of several families share. A family's `mapping` builds its table from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from models.weights.load import Rule

DECODER = "language_model.decoder.layers.{layer}."
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
VISUAL_PREFIXES = ("model.visual.", "visual.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""The names of the head in checkpoints. Older releases of models that wrap a whole language model have the second."""
VALUE_HEAD = Rule("value_head.weight", [], "rep", is_exported=False)
"""The rule for the head of a critic, which no checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """The name prefixes of a checkpoint's language model and of its vision tower, which changed between transformers
    releases."""

    text: str
    visual: str

    @classmethod
    def found_in(
        cls,
        names: Collection[str],
        family: str,
        *,
        visual: tuple[str, ...] = VISUAL_PREFIXES,
        in_visual: str = "patch_embed.proj.weight",
    ) -> Prefixes:
        """Return the prefixes of this checkpoint. `visual` are the prefixes that the tower may have; `in_visual` is a
        tensor that follows the right one.

        Raises ValueError if the checkpoint lacks the language model or the vision tower.
        """
        return cls(
            text=_prefix(names, TEXT_PREFIXES, "embed_tokens.weight", family),
            visual=_prefix(names, visual, in_visual, family),
        )

    @property
    def layer(self) -> str:
        """The prefix of a decoder layer."""
        return self.text + "layers.{layer}."


def end_rules(prefixes: Prefixes, names: Collection[str], *, is_head_tied: bool) -> list[Rule]:
    """Return the rules for the parts before and after the layers: embedding, head, last norm, vision tower."""
    embedding = prefixes.text + "embed_tokens.weight"
    head = next((name for name in HEADS if name in names), HEADS[0])
    copies = [head] if is_head_tied and head in names else []
    return [
        Rule("language_model.embedding.word_embeddings.weight", [embedding], "vocab", copies=copies),
        # the last pipeline stage has its own copy of a tied head: it is loaded, and not exported
        Rule("language_model.output_layer.weight", [embedding if is_head_tied else head], "vocab", not is_head_tied),
        Rule("language_model.decoder.final_layernorm.weight", [prefixes.text + "norm.weight"], "rep"),
        Rule("vision_model.visual.{rest}", [prefixes.visual + "{rest}"], "rep"),
    ]


def layer_rules(prefixes: Prefixes) -> list[Rule]:
    """Return the rules for norms, attention and a dense MLP of a layer."""
    layer = prefixes.layer
    attention, mlp = layer + "self_attn.", layer + "mlp."
    qkv = [attention + part for part in ("q_proj.", "k_proj.", "v_proj.")]
    return [
        Rule(DECODER + "input_layernorm.weight", [layer + "input_layernorm.weight"], "rep"),
        Rule(DECODER + "pre_mlp_layernorm.weight", [layer + "post_attention_layernorm.weight"], "rep"),
        # Transformer Engine's linear layers contain the norm before them
        Rule(DECODER + "self_attention.linear_qkv.layer_norm_weight", [layer + "input_layernorm.weight"], "rep"),
        Rule(DECODER + "mlp.linear_fc1.layer_norm_weight", [layer + "post_attention_layernorm.weight"], "rep"),
        Rule(DECODER + "self_attention.linear_qkv.weight", [name + "weight" for name in qkv], "qkv"),
        Rule(DECODER + "self_attention.linear_qkv.bias", [name + "bias" for name in qkv], "qkv"),
        Rule(DECODER + "self_attention.q_layernorm.weight", [attention + "q_norm.weight"], "rep"),
        Rule(DECODER + "self_attention.k_layernorm.weight", [attention + "k_norm.weight"], "rep"),
        Rule(DECODER + "self_attention.linear_proj.weight", [attention + "o_proj.weight"], "row"),
        Rule(DECODER + "mlp.linear_fc1.weight", [mlp + "gate_proj.weight", mlp + "up_proj.weight"], "gated"),
        Rule(DECODER + "mlp.linear_fc2.weight", [mlp + "down_proj.weight"], "row"),
    ]


def _prefix(names: Collection[str], prefixes: tuple[str, ...], tensor: str, family: str) -> str:
    for prefix in prefixes:
        if prefix + tensor in names:
            return prefix
    raise ValueError(
        f"no tensor {' or '.join(prefix + tensor for prefix in prefixes)} in the checkpoint; "
        f"model.path must hold the weights of a whole {family} model"
    )
