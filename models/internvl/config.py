"""Converts InternVL's Hugging Face config to megatron's TransformerConfig, and checks that all of its features are
supported."""

from __future__ import annotations

from typing import Any

import torch
from transformers import InternVLConfig

from models.compat.megatron_core import TransformerConfig
from models.decoder.config import decoder_config
from models.layout.parallel import Parallel

DECODERS = ("qwen2", "qwen3")
"""The `model_type`s of the decoders of InternVL3 and InternVL3.5."""

DROPOUTS = ("hidden_dropout_prob", "attention_dropout", "projection_dropout")


def transformer_config(hf_config: InternVLConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Return the decoder's configuration. Raises ValueError for another decoder or tower than the released models have.

    Dynamic RoPE scaling is plain RoPE up to `max_position_embeddings` tokens, here and in vLLM.
    """
    text: Any = hf_config.text_config
    check_tower(hf_config)
    _want("text_config.model_type", text.model_type, *DECODERS)
    _want("rope_parameters.rope_type", text.rope_parameters["rope_type"], "default", "dynamic")
    _want("use_sliding_window", text.use_sliding_window, False)
    # transformers reads the one, vLLM the other
    _want("text_config.tie_word_embeddings", text.tie_word_embeddings, hf_config.tie_word_embeddings)
    if text.model_type == "qwen2":
        head_size = text.hidden_size // text.num_attention_heads
        return decoder_config(text, parallel, dtype, kv_channels=head_size, add_qkv_bias=True)
    _want("attention_bias", text.attention_bias, False)
    return decoder_config(text, parallel, dtype, kv_channels=text.head_dim, qk_layernorm=True)


def check_tower(hf_config: InternVLConfig) -> None:
    """Raise ValueError for features that vLLM's tower does not have, or that would not be trained."""
    vision: Any = hf_config.vision_config
    _want("vision_feature_layer", hf_config.vision_feature_layer, -1)
    _want("vision_feature_select_strategy", hf_config.vision_feature_select_strategy, "default")
    _want("vision_config.use_mask_token", vision.use_mask_token, False)
    for key in DROPOUTS:
        _want(f"vision_config.{key}", getattr(vision, key), 0.0)
    num_squares = (vision.image_size[0] // vision.patch_size[0] // merge_size(hf_config)) ** 2
    _want("image_seq_length", hf_config.image_seq_length, num_squares)


def merge_size(hf_config: InternVLConfig) -> int:
    """Return the number of patches per visual token along each side, which is the factor of the pixel shuffle."""
    return round(1 / hf_config.downsample_ratio)


def _want(key: str, found: object, *wanted: object) -> None:
    if found not in wanted:
        raise ValueError(
            f"{key} is {found!r} in config.json; this version's InternVL has {' or '.join(map(repr, wanted))}, so "
            "choose a model of that kind"
        )
