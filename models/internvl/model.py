"""InternVL: tiles instead of patches, plain RoPE, and a Qwen2 or Qwen3 decoder."""

from __future__ import annotations

from transformers import InternVLConfig

from models.family import Family
from models.internvl.config import merge_size, transformer_config
from models.internvl.mapping import rules
from models.internvl.tower import Tower, make_visual
from models.sequence.media_tokens import TokenLayout


def token_layout(hf_config: InternVLConfig) -> TokenLayout:
    """Return one kind of token for all media: the frames of a video are images, with text between them."""
    return TokenLayout(image_token_id=hf_config.image_token_id, merge_size=merge_size(hf_config), has_mrope=False)


FAMILY = Family(
    config=InternVLConfig,
    transformer_config=transformer_config,
    rules=rules,
    make_visual=make_visual,
    tower=Tower,
    token_layout=token_layout,
)
