"""Makes a tiny InternVL folder that vLLM can serve: random weights, the tokenizer of the digits example, and a
processor that makes tiles."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from examples.digits.model import build_tokenizer

TILE_SIZE, TOKENS_PER_TILE = 56, 4
NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<IMG_CONTEXT>\\n' -}}{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""A chat template in which an image is one placeholder and nothing else, as in the released models."""
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": TILE_SIZE,
    "patch_size": 14,
    "attention_bias": True,
    "initializer_range": 0.06,
}


def build_internvl_folder(directory: Path, seed: int) -> Path:
    """Write a whole model folder and return it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )
    ids: dict[str, int] = tokenizer.get_vocab()
    config = InternVLConfig(
        text_config=TEXT | {"vocab_size": len(ids), "eos_token_id": ids["<|im_end|>"], "pad_token_id": 0},
        vision_config=VISION,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = InternVLForConditionalGeneration(config)
        for name, param in model.named_parameters():
            if name.endswith(("cls_token", "position_embeddings")):  # transformers makes them zero
                torch.nn.init.normal_(param, std=0.3)
    model.generation_config = GenerationConfig(eos_token_id=ids["<|im_end|>"], pad_token_id=0)
    model.save_pretrained(directory)
    size = {"height": TILE_SIZE, "width": TILE_SIZE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessorPil(size=size, max_patches=6),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    processor.image_processor.save_pretrained(directory)
    return directory
