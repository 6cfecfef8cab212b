"""Continuing a group that was cut off: what earlier attempts sampled, what is left to sample, and joining the two.

A group may be cut off any number of times and continue on another engine or with newer weights. Every token keeps the
log-probability and the policy version of the weights that sampled it. Pure values: `worker` handles refs and the
engine.
"""

import bisect
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from yatt_mm.protocol.group_record import GroupRecord, SampleRecord
from yatt_mm.protocol.rollout import PromptTask, SamplingSettings
from yatt_mm.rollout.engine_types import GenerateRequest, Medium, Sampled

_NOTHING = SampleRecord(
    token_ids=np.empty(0, np.int64),
    logprobs=np.empty(0, np.float32),
    policy_versions=np.empty(0, np.int64),
    text="",
    finish_reason="abort",
)
"""The sample before its first token: empty arrays, cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One attempt at a task: its prompt, and the samples that it continues."""

    task: PromptTask
    sampling: SamplingSettings
    prompt: list[int]
    """The token ids, with the placeholders of the media expanded."""
    earlier: tuple[SampleRecord, ...]
    """[G] The samples of the last attempt; samples without a token if this is the first attempt."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples that continue: they were cut off, and have room for more tokens."""
        return [i for i, sample in enumerate(self.earlier) if sample.finish_reason == "abort" and not self._is_full(i)]

    def request(self, media: tuple[Medium, ...]) -> GenerateRequest:
        """Return the engine's request for the unfinished samples; each continues where it stopped."""
        unfinished = self.unfinished
        return GenerateRequest(
            prompt_token_ids=self.prompt,
            media=media,
            seeds=tuple(self._seed(sample) for sample in unfinished),
            max_tokens=self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            greedy=self.sampling.greedy,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            stop=self.sampling.stop,
            begun=tuple(tuple(self.earlier[sample].token_ids.tolist()) for sample in unfinished),
        )

    def joined(self, sampled: Sequence[Sampled], decode: Callable[[list[int]], str]) -> GroupRecord:
        """Return the whole group.

        `sampled`: new tokens of the unfinished samples, in order. `decode`: makes a response's text from its token ids.
        """
        new = dict(zip(self.unfinished, sampled, strict=True))
        samples = [
            _stopped(_continued(sample, new[i], decode), len(sample.token_ids), self.sampling.stop, decode)
            if i in new
            else self._closed(i)
            for i, sample in enumerate(self.earlier)
        ]
        return GroupRecord(prompt_token_ids=np.array(self.prompt, dtype=np.int64), samples=tuple(samples))

    def _is_full(self, sample: int) -> bool:
        return len(self.earlier[sample].token_ids) >= self.sampling.max_tokens

    def _closed(self, index: int) -> SampleRecord:
        """Return an earlier sample that is not continued. If it was cut off at the limit, its finish reason is
        "length"."""
        sample = self.earlier[index]
        return dataclasses.replace(sample, finish_reason="length") if sample.finish_reason == "abort" else sample

    def _seed(self, sample: int) -> int:
        """Return the seed of the sample's next token.

        The seed depends on the tokens so far: with the same seed a continued sample would draw the same random numbers
        again.
        """
        seed = sample_seed(self.task.seed, sample)
        num_tokens = len(self.earlier[sample].token_ids)
        return sample_seed(seed, num_tokens) if num_tokens else seed


def begin_attempt(
    task: PromptTask, sampling: SamplingSettings, prompt: list[int], partial: GroupRecord | None
) -> Continuation:
    """Return the first attempt at a task, or if `partial` is given, the attempt that continues it.

    Raises:
        ValueError: `partial` has another prompt or another number of samples than the task.
    """
    if partial is None:
        return Continuation(task=task, sampling=sampling, prompt=prompt, earlier=(_NOTHING,) * task.num_samples)
    if len(partial.samples) != task.num_samples or partial.prompt_token_ids.tolist() != prompt:
        raise ValueError(
            f"task {task.name} wants {task.num_samples} samples of a prompt of {len(prompt)} tokens, and its partial "
            f"record has {len(partial.samples)} of a prompt of {len(partial.prompt_token_ids)} tokens "
            f"({'the same' if partial.prompt_token_ids.tolist() == prompt else 'other'} ids): "
            "give the record of an earlier attempt at the same task"
        )
    return Continuation(task=task, sampling=sampling, prompt=prompt, earlier=partial.samples)


def sample_seed(group_seed: int, sample: int) -> int:
    """Return the seed of one sample, 31 bits. It depends only on the group's seed and the sample's index."""
    digest = hashlib.blake2b(f"{group_seed} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _stopped(
    sample: SampleRecord, num_earlier: int, stop: Sequence[str], decode: Callable[[list[int]], str]
) -> SampleRecord:
    """Return the sample up to the first text that ends it. The engine itself stops at such a text, but not at one that
    begins in the `num_earlier` tokens of earlier attempts."""
    if not num_earlier or not any(text in sample.text for text in stop):
        return sample

    def text_of(num_tokens: int) -> str:
        return decode(sample.token_ids[:num_tokens].tolist())

    counts = range(num_earlier, len(sample.token_ids))
    found = bisect.bisect_left(counts, True, key=lambda count: any(ending in text_of(count) for ending in stop))
    num_tokens = num_earlier + found
    return SampleRecord(
        token_ids=sample.token_ids[:num_tokens],
        logprobs=sample.logprobs[:num_tokens],
        policy_versions=sample.policy_versions[:num_tokens],
        text=text_of(num_tokens),
        finish_reason="stop",
    )


def _continued(earlier: SampleRecord, sampled: Sampled, decode: Callable[[list[int]], str]) -> SampleRecord:
    """Return the sample with its earlier tokens followed by its new ones."""
    token_ids = np.concatenate([earlier.token_ids, np.array(sampled.token_ids, dtype=np.int64)])
    return SampleRecord(
        token_ids=token_ids,
        logprobs=np.concatenate([earlier.logprobs, np.array(sampled.logprobs, dtype=np.float32)]),
        policy_versions=np.concatenate([earlier.policy_versions, np.array(sampled.policy_versions, dtype=np.int64)]),
        text=decode(token_ids.tolist()) if len(earlier.token_ids) else sampled.text,
        finish_reason=sampled.finish_reason,
    )
