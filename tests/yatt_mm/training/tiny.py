"""Makes model folders of a few hundred kilobytes, one of each family, and samples. All weights are random, also those
of norms.

Images cross the window borders of the vision tower. Samples have no image, one or two; one image is shared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from yatt_mm.training.train_sample import SampledTokens, TrainSample

IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN = 6, 3, 4, 7
VOCAB_SIZE = 197
"""The size of the vocabulary. It is padded to 200, and to 208 over two tensor-parallel ranks, so that the padding is
tested."""
PATCH_VALUES = 3 * 2 * 4 * 4
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def build_folder(directory: Path, family: str = "qwen2_5_vl", *, is_head_tied: bool = False) -> Path:
    """Write config, weights and processor settings. Return the folder."""
    model = (MODELS | DEEP)[family](is_head_tied).float()
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * (0.2 if param.dim() == 1 else 0.05))
    model.save_pretrained(directory)
    if family == "qwen3_vl_moe":
        release_experts(directory / "model.safetensors")
    settings = {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 4096,
        "image_mean": MEAN,
        "image_std": STD,
    }
    if family.startswith("internvl"):
        settings |= {"size": {"height": TILE_SIZE, "width": TILE_SIZE}}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


def release_experts(path: Path) -> None:
    """Write experts in the form of the released checkpoints, [num_experts, in, out]; vLLM reads no other form."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _qwen2_5_vl(is_head_tied: bool, num_layers: int = 2, **of_text: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = TEXT | {"num_hidden_layers": num_layers, "rope_parameters": rope, "tie_word_embeddings": is_head_tied}
    text |= of_text
    vision = VISION | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    tokens = TOKENS | {"tie_word_embeddings": is_head_tied}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))


def _qwen3_vl(is_head_tied: bool) -> PreTrainedModel:
    """Return a Qwen3-VL model with its own head size, a position table smaller than some images, and features for two
    layers."""
    text = TEXT | QWEN3_TEXT | {"tie_word_embeddings": is_head_tied}
    tokens = TOKENS | {"tie_word_embeddings": is_head_tied}
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=VISION | QWEN3_VISION, **tokens)
    )


def _qwen3_vl_moe(is_head_tied: bool) -> PreTrainedModel:
    """Return a Qwen3-VL-MoE model with eight experts, two for each token, in all layers but one."""
    text = TEXT | QWEN3_TEXT | {"tie_word_embeddings": is_head_tied}
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [2]}
    tokens = TOKENS | {"tie_word_embeddings": is_head_tied}
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=VISION | QWEN3_VISION, **tokens)
    )


def _internvl(is_head_tied: bool, decoder: str = "qwen2") -> PreTrainedModel:
    """Return an InternVL model with four patches a token, in tiles of 4 x 4; the class token and both norms of a block
    are trained."""
    text: dict[str, Any] = TEXT | {"model_type": decoder, "num_hidden_layers": 2, "tie_word_embeddings": is_head_tied}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    text |= {"head_dim": 24} if decoder == "qwen3" else {}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": TILE_SIZE,
        "attention_bias": True,
    }
    tokens = {"image_token_id": IMAGE_TOKEN, "image_seq_length": 4, "tie_word_embeddings": is_head_tied}
    torch.manual_seed(0)
    return InternVLForConditionalGeneration(InternVLConfig(text_config=text, vision_config=vision, **tokens))


TILE_SIZE = 16
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
QWEN3_TEXT = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [6, 3, 3],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    },
}
QWEN3_VISION = {"depth": 3, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
MODELS = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "internvl": _internvl,
}
"""From model_type to a function that returns a random model; its argument says whether the head is tied."""
DEEP = {
    "qwen2_5_vl_deep": partial(_qwen2_5_vl, num_layers=4),
    "qwen2_5_vl_wide": partial(_qwen2_5_vl, intermediate_size=2**15),  # 50 MB
    "internvl_qwen3": partial(_internvl, decoder="qwen3"),
}
"""Additional models, which need not equal transformers in every layout."""

Form = Literal["spans", "frames", "tiles"]
"""How media become spans: a video is one span, or every frame is one span, or all media are images of tiles."""
FORMS: dict[str, Form] = {
    "qwen2_5_vl": "spans",
    "qwen3_vl": "frames",
    "qwen3_vl_moe": "frames",
    "internvl": "tiles",
}
"""The form of each model_type."""


def make_samples(form: Form = "spans") -> list[TrainSample]:
    """Return eight samples: with images of several sizes, one of them shared by two samples; without media (numbers 2
    and 5); with a video; with a video between two images.

    In the form "tiles", images of one and of several tiles stand in the same places.
    """
    random = np.random.default_rng(0)
    lengths = [13, 9, 17, 30, 5, 21, 11, 8]
    media = _tiled_media(random) if form == "tiles" else _patched_media(random)
    return [_sample(random, parts, length, form) for parts, length in zip(media, lengths)]


def _tiled_media(random: np.random.Generator) -> list[list[_Medium]]:
    def tiles(number: int) -> _Medium:
        pixels = random.integers(0, 256, (number, 3, TILE_SIZE, TILE_SIZE), dtype=np.uint8)
        return _Medium((number, 4, 4), pixels)

    shared = tiles(1)
    images = [[tiles(3)], [shared, tiles(4)], [], [tiles(5)], [shared], [], [tiles(3)]]
    return [*images, [tiles(1), tiles(3), shared]]


def _patched_media(random: np.random.Generator) -> list[list[_Medium]]:
    shared = _patches(random, (1, 4, 4))
    return [
        [_Medium((1, 8, 6))],
        [_Medium((1, 4, 4), shared), _Medium((1, 6, 8))],
        [],
        [_Medium((1, 10, 4))],
        [_Medium((1, 4, 4), shared)],
        [],
        [_Medium((3, 4, 6), seconds=1.25)],
        [_Medium((1, 4, 4)), _Medium((2, 6, 4), seconds=0.7), _Medium((1, 4, 4), shared)],
    ]


@dataclass(frozen=True)
class _Medium:
    grid: tuple[int, int, int]
    patches: np.ndarray | None = None
    seconds: float | None = None
    """The seconds from one t to the next; None for an image."""


def with_patches_of(sample: TrainSample, is_own: Sequence[bool]) -> TrainSample:
    """Return the sample with the patches of some of its media only, as it reaches a rank that encodes these."""
    patches = tuple(array if own else None for array, own in zip(sample.patches, is_own, strict=True))
    return replace(sample, patches=patches)


def _patches(random: np.random.Generator, grid: tuple[int, int, int]) -> np.ndarray:
    return random.integers(0, 256, (int(np.prod(grid)), PATCH_VALUES), dtype=np.uint8)


def _sample(random: np.random.Generator, media: list[_Medium], num_text: int, form: Form) -> TrainSample:
    tokens, patches = [10, 11], []
    for medium in media:
        t, h, w = medium.grid
        token = IMAGE_TOKEN if medium.seconds is None else VIDEO_TOKEN
        num_spans = t if form == "frames" and medium.seconds is not None else 1
        for _ in range(num_spans):
            tokens += [VISION_START] + [token] * (t // num_spans * h * w // 4) + [VISION_END, 20]
        patches.append(_patches(random, medium.grid) if medium.patches is None else medium.patches)
    num_prompt = len(tokens) + 2
    tokens += random.integers(30, VOCAB_SIZE, num_text).tolist()
    num_sampled = len(tokens) - num_prompt
    return TrainSample(
        token_ids=np.array(tokens, dtype=np.int64),
        loss_mask=np.arange(len(tokens)) >= num_prompt,
        grid_thw=tuple(medium.grid for medium in media),
        seconds_per_grid=tuple(medium.seconds or 1.0 for medium in media),
        patches=tuple(patches),
        media_keys=tuple(hashlib.sha256(array.tobytes()).hexdigest() for array in patches),
        sampled=only_weights(random.random(num_sampled).astype(np.float32) / 50),
    )


def only_weights(weights: np.ndarray) -> SampledTokens:
    """Return tokens for a loss that uses nothing but their weights, [K] float32."""
    zeros = np.zeros_like(weights)
    return SampledTokens(
        weights=weights, advantages=zeros, rollout_logprobs=zeros, is_stale=np.zeros(len(weights), dtype=bool)
    )
