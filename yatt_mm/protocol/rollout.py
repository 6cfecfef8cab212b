"""What controllers and rollout workers say to each other: names, lengths and refs, never a pixel or a token.

Imported in controllers, so it must stay free of torch, vllm and PIL.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.core.refs import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the tokens of one phase are sampled."""

    max_tokens: int
    """Upper bound on the response, in tokens, the end-of-turn token included."""
    temperature: float = 1.0
    """Divides the logits; the trainer applies the same value."""
    greedy: bool = False
    """True takes the most likely token (evaluation); seeds and temperature are then without effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """One prompt to be answered `num_samples` times (a group)."""

    slot: int
    """Position of the prompt in the run's global order; names the group within a step."""
    question: str
    """The user's text, put after the media by the model's chat template."""
    media: tuple[Ref, ...]
    """Derived refs (uint8 patches of images and videos), in the order in which they stand in the prompt."""
    num_samples: int
    seed: int
    """Sample i is drawn with a seed that depends on (seed, i) alone."""
    name: str
    """Name of the plain object that the rollout worker writes; no other attempt has the same."""
    partial: Ref | None = None
    """What an earlier attempt at this group wrote: its finished samples are kept, those that were cut off go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """A group as an attempt left it: where its tokens lie, and what a scheduler needs to know about them."""

    slot: int
    ref: Ref
    """Plain object: the Arrow record of `yatt_mm.protocol.group_record`."""
    media: tuple[Ref, ...]
    num_prompt_tokens: int
    """Length of the prompt with the placeholders of its media expanded."""
    lengths: tuple[int, ...]
    """[G] sampled tokens per sample, of all attempts."""
    policy_versions: tuple[tuple[int, int], ...]
    """[G] lowest and highest policy version among a sample's tokens; the engine's where it has none."""
    finish_reasons: tuple[str, ...]
    """[G] `stop`, `length` or `abort`: cut off, possibly before its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is made from, as far as the config decides it."""

    model_dir: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    max_images_per_prompt: int
    max_videos_per_prompt: int
    deadline_s: float
    scope: str
    """Of the data plane: what the engine stores is in it, and goes with the run."""
    durable: bool
    """What it stores outlives the data plane's node."""
    tp: int = 1
    """Devices over which its tensors are cut."""
    num_labels: int | None = None
    """Of a sequence classifier; None for a model that generates."""
    cores: tuple[int, ...] = ()
    """The processor cores to which everything of the engine is pinned; none leaves it to the kernel."""
