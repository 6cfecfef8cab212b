"""Makes a Qwen2.5-VL of about a million parameters, saved as an ordinary Hugging Face folder.

Everything is made from a seed: the real configuration classes, random fp32 weights, a byte-level BPE tokenizer trained
on the page of text below, a chat template, and the processor. The model has learned nothing yet (see warmup.py).

The sizes divide by 2 for tensor and pipeline parallelism. Sizes whose equality could hide a transposed or misplaced
weight differ from each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB_SIZE = 384
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MIN_IMAGE_SIDE = 56
MAX_IMAGE_SIDE = 224
INITIALIZER_RANGE = 0.06
"""The standard deviation of the random weights. It is larger than the usual 0.02, because layers as narrow as these
would otherwise pass on almost nothing at the start."""

# Qwen2's pre-tokenizer: every digit is a piece of its own, words keep their leading space.
QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_TEXT = """assistant assistant assistant assistant user user system system
You are a helpful assistant. What digit is this? What digit is in the picture? Answer with the digit.
Which number is written here? The image shows a handwritten digit. Describe the picture in one word.
Read the number in the image and answer with a single digit: 0, 1, 2, 3, 4, 5, 6, 7, 8 or 9.
How many things are there? Is this correct? Yes or no. Think first, then answer. True or false.
"""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def build_model_folder(directory: Path, *, seed: int = 0, text: str = TOKENIZER_TEXT) -> None:
    """Write config, fp32 weights (random, from the seed), tokenizer (from the text) and processor into `directory`."""
    tokenizer = build_tokenizer(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    processor = build_processor(tokenizer)
    processor.save_pretrained(directory)
    processor.image_processor.save_pretrained(directory)  # preprocessor_config.json, which most readers look for


def load_processor(directory: Path) -> Qwen2_5_VLProcessor:
    """Return the folder's processor, with the Pillow resize that training uses.

    A saved folder cannot select Pillow: transformers 5.19 writes both backends under one name, and chooses
    torchvision's if it can be imported. The two differ only for images that must be resized.
    """
    processor: Qwen2_5_VLProcessor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return processor


def build_tokenizer(text: str = TOKENIZER_TEXT) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on the text. It can encode any other text too; each digit is one
    token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Return the model's config, with the ids that the tokenizer gave to the special tokens."""
    ids: dict[str, int] = tokenizer.get_vocab()
    text_config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 4,
        "out_hidden_size": text_config["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
        "initializer_range": INITIALIZER_RANGE,
    }
    return Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Return Qwen2.5-VL's processor, with the image processor that resizes with Pillow."""
    bounds = {"min_pixels": MIN_IMAGE_SIDE**2, "max_pixels": MAX_IMAGE_SIDE**2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**bounds),
        video_processor=Qwen2VLVideoProcessor(**bounds),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
