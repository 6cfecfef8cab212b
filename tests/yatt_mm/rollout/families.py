"""Makes tiny Qwen3-VL folders that vLLM can serve: random weights, the digits example's tokenizer, and a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.digits.model import CHAT_TEMPLATE, build_tokenizer

PATCH_SIZE = 14
TEXT = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
    "initializer_range": 0.06,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
"""The sizes of experts, which vLLM pads on the CPU."""
VISION = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": PATCH_SIZE,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.06,
}


def build_served_folder(directory: Path, seed: int, *, has_experts: bool = False) -> Path:
    """Write a whole model folder and return it. Experts are written in the form of transformers."""
    tokenizer = build_tokenizer()
    ids: dict[str, int] = tokenizer.get_vocab()
    tokens: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    end = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": 0}
    text = TEXT | end | {"tie_word_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build_model(text, tokens, has_experts)
    model.generation_config = GenerationConfig(eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    model.save_pretrained(directory)
    bounds = {"min_pixels": 56**2, "max_pixels": 224**2}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH_SIZE, **bounds)
    processor = Qwen3VLProcessor(
        image_processor=images,
        video_processor=Qwen3VLVideoProcessor(
            patch_size=PATCH_SIZE, image_mean=images.image_mean, image_std=images.image_std
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    processor.image_processor.save_pretrained(directory)
    return directory


def _build_model(text: dict[str, Any], tokens: dict[str, Any], has_experts: bool) -> PreTrainedModel:
    if has_experts:
        config = Qwen3VLMoeConfig(text_config=text | EXPERTS, vision_config=VISION, **tokens)
        return Qwen3VLMoeForConditionalGeneration(config)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=VISION, **tokens))
