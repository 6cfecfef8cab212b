"""The messages between controllers and rollout workers: names, lengths and refs, never a pixel or a token.

Imported in controllers, so it must stay free of torch, vllm and PIL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataplane.core.refs import Ref
from yatt_mm.common.conversation import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the tokens of one phase are sampled."""

    max_tokens: int
    """The most tokens of a response, the end-of-turn token included."""
    temperature: float = 1.0
    """The number by which the logits are divided; the trainer applies the same value."""
    greedy: bool = False
    """True takes the most likely token (evaluation); seeds, temperature and the limits below then have no effect."""
    top_p: float = 1.0
    """In evaluation alone: only the most likely tokens are sampled that together have this probability."""
    top_k: int = 0
    """In evaluation alone: only this many of the most likely tokens are sampled; 0 sets no limit."""
    min_p: float = 0.0
    """In evaluation alone: only tokens are sampled with at least this share of the most likely token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, which keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """One prompt for which `num_samples` responses (a group) are sampled."""

    slot: int
    """The position of the prompt in the run's global order; names the group within a step."""
    conversation: Conversation
    """The turns that the model reads."""
    media: tuple[Ref, ...]
    """Derived refs (uint8 patches of images and videos), in the order of the conversation."""
    num_samples: int
    seed: int
    """Sample i is drawn with a seed that depends on (seed, i) alone."""
    name: str
    """The name of the plain object that the rollout worker writes. No other attempt has the same name."""
    partial: Ref | None = None
    """The record of an earlier attempt at this group: its finished samples are kept, and samples that were cut off
    continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """The result of an attempt at a group: where its tokens are, and what a scheduler needs to know about them."""

    slot: int
    ref: Ref
    """The plain object: the Arrow record of `yatt_mm.protocol.group_record`."""
    media: tuple[Ref, ...]
    num_prompt_tokens: int
    """The length of the prompt with the placeholders of its media expanded."""
    lengths: tuple[int, ...]
    """[G] sampled tokens per sample, over all attempts."""
    policy_versions: tuple[tuple[int, int], ...]
    """[G] lowest and highest policy version among a sample's tokens; for a sample without tokens the engine's
    version."""
    finish_reasons: tuple[str, ...]
    """[G] `stop`, `length`, or `abort` for a sample that was cut off, possibly before its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The settings of an engine that the config decides."""

    model_dir: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    max_images_per_prompt: int
    max_videos_per_prompt: int
    deadline_s: float
    scope: str
    """The scope of the data plane for the engine's objects, which end with the run."""
    durable: bool
    """True if the engine's objects survive the death of the data plane's node."""
    tp: int = 1
    """The number of devices over which the tensors of the model are cut."""
    num_labels: int | None = None
    """The number of labels of a sequence classifier; None for a model that generates."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's chat template."""
    cores: tuple[int, ...] = ()
    """The processor cores for all threads of the engine; none leaves the choice to the system."""
