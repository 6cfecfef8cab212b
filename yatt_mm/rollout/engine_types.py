"""Requests, results, settings and errors of an engine: plain values that need neither torch nor vLLM.

Left out: refs and names of the data plane (`yatt_mm.protocol.rollout`), which the worker turns into these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataplane.media.kinds import MediaKind
from models.recipes.media_recipes import VIDEO_RULES
from yatt_mm.common.errors import WorkerError
from yatt_mm.protocol.rollout import EngineSpec


class EngineError(WorkerError):
    """The engine cannot serve a request; the message names the engine and the reason."""


class EngineAsleepError(EngineError):
    """A request came to an engine that is asleep."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not finish before the deadline."""


class MediaDroppedError(EngineError):
    """The engine's process no longer held media that had been sent earlier; send the request once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine. Sizes are upper bounds: memory is used only when it is needed."""

    model_dir: str
    """A Hugging Face folder with its tokenizer and processor."""
    name: str = "rollout"
    """The engine's name in logs and errors."""
    dtype: str = "float32"
    """The dtype of weights and activations, by the names that vLLM uses."""
    max_model_len: int = 4096
    """The maximum number of tokens of a prompt and its response together."""
    max_num_seqs: int = 256
    """The maximum number of samples that are computed at the same time."""
    max_num_batched_tokens: int = 8192
    """The maximum number of tokens of one engine step; this also limits the image tokens of one encoder call."""
    kv_cache_bytes: int = 2**28
    """The size of the KV cache in bytes."""
    block_size: int = 32
    """The number of tokens in one block of the KV cache, the unit that prefix caching shares. vLLM's CPU attention
    needs multiples of 32."""
    max_images_per_prompt: int = 1
    """The number of images that a prompt may have; the engine refuses requests with more."""
    max_videos_per_prompt: int = 0
    """The number of videos that a prompt may have; the engine refuses requests with more."""
    media_cache_bytes: int = 2**28
    """The number of bytes of patches that the engine process keeps, so that they are not sent again for other samples
    and later steps."""
    num_threads: int = 1
    """The number of threads that compute, on the CPU."""
    tensor_parallel_size: int = 1
    """The number of processes, each with one device, among which the model is divided."""
    normalize_on_device: bool | None = None
    """None: vLLM decides whether its model normalises uint8 patches itself. False: the frontend normalises them."""
    num_labels: int | None = None
    """The number of labels of a sequence classifier, which serves only requests with `max_tokens` 0. None: the model
    generates."""
    policy_version: int = 0
    """The version of the weights in `model_dir`."""
    reload_on_wake: bool = False
    """True: read the weights again on every wake-up, even if the engine kept them while it was asleep, as on the
    CPU."""
    start_timeout_s: float = 300.0
    """The timeout of the engine's start, in seconds."""
    answer_timeout_s: float = 600.0
    """The seconds in which an engine with samples to compute must finish at least one; also the timeout of a weight
    update."""
    shutdown_timeout_s: float = 20.0
    """The timeout for ending the engine's processes, in seconds."""

    @classmethod
    def of(cls, spec: EngineSpec, *, name: str = "rollout") -> EngineConfig:
        """Return the settings that the run's config decides, with defaults for all others."""
        return cls(
            name=name,
            model_dir=spec.model_dir,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            kv_cache_bytes=spec.kv_cache_bytes,
            max_images_per_prompt=spec.max_images_per_prompt,
            max_videos_per_prompt=spec.max_videos_per_prompt,
            tensor_parallel_size=spec.tp,
            num_labels=spec.num_labels,
            answer_timeout_s=spec.deadline_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """The tokens with which a model writes media into its prompts."""

    image: int
    """The token id of the placeholder for one merged patch of an image."""
    video: int | None
    """The token id of the placeholder for one merged patch of a video; None if the model takes no videos."""
    image_marks: tuple[str, ...] = ()
    """The texts of the tokens before and after each image, if the chat template leaves them out: two or none."""
    start: int | None = None
    """The id of the token that opens a span of vision tokens; needed if `has_spans_per_frame` is True."""
    end: int | None = None
    """The id of the token that closes a span of vision tokens."""
    has_spans_per_frame: bool = False
    """True if every temporal step of a video's grid has its own span, with its time as text before it."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], image_marks: tuple[str, ...]) -> MediaTokens:
        """Return the tokens with which the model of a Hugging Face config writes media into its prompts."""
        rules = VIDEO_RULES.get(config["model_type"])
        return cls(
            image=int(config["image_token_id"]),
            image_marks=image_marks,
            video=int(config["video_token_id"]) if rules else None,
            start=config.get("vision_start_token_id"),
            end=config.get("vision_end_token_id"),
            has_spans_per_frame=rules is not None and rules.has_spans_per_frame,
        )

    def of(self, kind: MediaKind) -> int | None:
        """Return the placeholder token of a kind of medium."""
        return self.image if kind == "image" else self.video


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One image or video, ready for the model's vision tower."""

    kind: MediaKind = "image"
    digest: str
    """The name of the content in all of the engine's caches: equal digests must mean equal patches."""
    patches: np.ndarray
    """[N, D] uint8 patches before rescaling and normalising, or [t, C, S, S] tiles; a read-only view is allowed."""
    grid_thw: tuple[int, int, int]
    """The number of patches in time, height and width; N is their product. For tiles: the number of tiles, and the
    patches of one tile in height and width."""
    seconds_per_grid: float = 1.0
    """The seconds between two temporal steps of a video's grid; images do not use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, and how its samples are drawn."""

    prompt_token_ids: Sequence[int]
    """The token ids as the model will read them, with one placeholder per image or video token."""
    media: tuple[Medium, ...] = ()
    """The prompt's images and videos, in the order of their placeholders."""
    seeds: tuple[int, ...] = (0,)
    """One seed per sample of the group."""
    max_tokens: int
    """The maximum number of tokens of a response. 0 is for classifiers: nothing is sampled, and the head reads the
    prompt's last token."""
    temperature: float = 1.0
    """The temperature by which logits are divided."""
    greedy: bool = False
    """True: take the most likely token; seed, temperature and the limits below have no effect."""
    top_p: float = 1.0
    """Only the most likely tokens are sampled that together have this probability."""
    top_k: int = 0
    """Only this many of the most likely tokens are sampled; 0 sets no limit."""
    min_p: float = 0.0
    """Only tokens are sampled with at least this share of the most likely token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, which keeps them."""
    scored_token_ids: tuple[int, ...] = ()
    """The ids of tokens whose log-probability as the first token of the response is returned, sampled or not; at most
    20."""
    begun: tuple[tuple[int, ...], ...] = ()
    """[sample] Response tokens that the sample continues; they count in `max_tokens`. Empty if no sample has any."""

    def tokens_begun(self, sample: int) -> tuple[int, ...]:
        """Return the response tokens that this sample continues."""
        return self.begun[sample] if self.begun else ()


@dataclass(slots=True, kw_only=True, eq=False)
class Cut:
    """A handle for ending one group early: give it to `VllmEngine.generate`, and later to `VllmEngine.abort`."""

    name: str
    """The name of the group's task."""
    is_made: bool = False
    """True once the group is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One response, or the part of it that one request sampled."""

    token_ids: tuple[int, ...]
    """[T] Ids of the new tokens, without those that the sample continued; with the end-of-sequence token if it was
    sampled."""
    logprobs: tuple[float, ...]
    """[T] Log-probability of each token under the distribution from which it was drawn (with temperature)."""
    text: str
    """The text of the tokens, without special tokens."""
    finish_reason: str
    """One of "stop", "length" and "abort"; "abort" means that the sample was cut off."""
    policy_versions: tuple[int, ...] = field(default=())
    """[T] Version of the weights that sampled each token."""
    scored_logprobs: tuple[float, ...] = ()
    """[scored_token_ids] Log-probability of each as the first sampled token; empty if no token was sampled."""
    label_logits: tuple[float, ...] = ()
    """[num_labels] Logits of a classifier's head, before any activation; empty if the model generates."""


ABORTED = Sampled(token_ids=(), logprobs=(), text="", finish_reason="abort")
"""The result of a sample that was ended before it was sent to the engine."""
