"""What an engine is told and what it answers: plain values, free of torch and vLLM.

Left out: refs and names (`messages`), which the worker turns into these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dataplane.media.kinds import MediaKind
from yatt_mm.common.errors import WorkerError
from yatt_mm.protocol.rollout import EngineSpec


class EngineError(WorkerError):
    """The engine cannot answer; the message names it and says why."""


class EngineAsleepError(EngineError):
    """Work was given to an engine that was put to sleep."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer before the deadline."""


class MediaDroppedError(EngineError):
    """The engine's process no longer held media that had been sent before: send the request once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Sizes are upper bounds: nothing is touched before it is used."""

    model_dir: str
    """A Hugging Face folder with its tokenizer and processor."""
    name: str = "rollout"
    """Names the engine in logs and errors."""
    dtype: str = "float32"
    max_model_len: int = 4096
    """Prompt and response, in tokens."""
    max_num_seqs: int = 256
    """Samples that are computed at the same time."""
    max_num_batched_tokens: int = 8192
    """Tokens of one engine step; also bounds the image tokens of one encoder call."""
    kv_cache_bytes: int = 2**28
    block_size: int = 32
    """Tokens of one block of the KV cache: what prefix caching shares. vLLM's CPU attention wants multiples of 32."""
    max_images_per_prompt: int = 1
    """Requests with more are refused."""
    max_videos_per_prompt: int = 0
    """The same for videos."""
    media_cache_bytes: int = 2**28
    """Patches that the engine process keeps, so that a group's samples and later steps need not send them again."""
    num_threads: int = 1
    """Threads that compute, on the CPU."""
    tensor_parallel_size: int = 1
    """Processes, with a device each, over which the model is cut."""
    normalize_on_device: bool | None = None
    """None asks vLLM whether its model normalises uint8 patches itself; False makes the frontend do it."""
    num_labels: int | None = None
    """Of a sequence classifier, which answers requests of `max_tokens` 0 and no others; None for one that generates."""
    policy_version: int = 0
    """Version of the weights in `model_dir`."""
    reload_on_wake: bool = False
    """True reads the weights again when the engine wakes even where it kept them asleep, as on the CPU."""
    start_timeout_s: float = 300.0
    answer_timeout_s: float = 600.0
    """How long the engine may finish nothing while it has samples to compute; also how long one update may take."""
    shutdown_timeout_s: float = 20.0

    @classmethod
    def of(cls, spec: EngineSpec, *, name: str = "rollout") -> EngineConfig:
        """What a run's configuration decides, and defaults for the rest."""
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
    """How a model writes media into its prompts."""

    image: int
    """Id of the token that stands for one merged patch of an image."""
    video: int | None
    """The same for videos; None where the model takes none."""
    image_marks: tuple[str, ...] = ()
    """Tokens before and after each image that the chat template leaves out; none, or two."""
    start: int | None = None
    """Id of what opens a span of vision tokens; needed where `has_spans_per_frame`."""
    end: int | None = None
    """Id of what closes it."""
    has_spans_per_frame: bool = False
    """True where every t of a video's grid is a span of its own, with its time as text before it."""

    def of(self, kind: MediaKind) -> int | None:
        """The token of a kind of medium."""
        return self.image if kind == "image" else self.video


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One image or video, ready for the model's vision tower."""

    kind: MediaKind = "image"

    digest: str
    """Stands for the content in all of the engine's caches: equal digests must mean equal patches."""
    patches: np.ndarray
    """[N, D] uint8, before rescale and normalise, or tiles [t, C, S, S]; a read-only view is fine."""
    grid_thw: tuple[int, int, int]
    """Temporal, vertical and horizontal number of patches; N is their product. Of tiles, their number, and the patches
    of one."""
    seconds_per_grid: float = 1.0
    """Of a video, from one t of the grid to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and the seeds of its samples."""

    prompt_token_ids: Sequence[int]
    """With one placeholder token per image or video token, as the model will see it."""
    media: tuple[Medium, ...] = ()
    """In the order in which their placeholders stand in the prompt."""
    seeds: tuple[int, ...] = (0,)
    """One per sample of the group."""
    max_tokens: int
    """0 asks a classifier: nothing is sampled, and the last token of the prompt is what its head sees."""
    temperature: float = 1.0
    greedy: bool = False
    """True takes the most likely token, whatever the seed and temperature."""
    scored_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probability as the first of the response is wanted, sampled or not; vLLM takes up to 20."""
    begun: tuple[tuple[int, ...], ...] = ()
    """Per sample the response tokens that it goes on from, counted in `max_tokens`; empty where none has any."""

    def tokens_begun(self, sample: int) -> tuple[int, ...]:
        """The response tokens that this sample goes on from."""
        return self.begun[sample] if self.begun else ()


@dataclass(slots=True, kw_only=True, eq=False)
class Cut:
    """Ends one group early: given to `Engine.generate` with its request, and later to `Engine.abort`."""

    name: str
    is_made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One response."""

    token_ids: tuple[int, ...]
    """[T] after those that the sample went on from; the end-of-sequence token included when it was sampled."""
    logprobs: tuple[float, ...]
    """[T] under the distribution the token was drawn from (temperature applied)."""
    text: str
    """Without special tokens."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    policy_versions: tuple[int, ...] = field(default=())
    """[T] version of the weights that gave each token."""
    scored_logprobs: tuple[float, ...] = ()
    """One per token of the request's `scored_token_ids`, at the first position; empty where no token was sampled."""
    label_logits: tuple[float, ...] = ()
    """[num_labels] what a classifier's head gives, before any activation; empty where tokens are sampled."""


ABORTED = Sampled(token_ids=(), logprobs=(), text="", finish_reason="abort")
"""A sample that was ended before the engine had it."""
