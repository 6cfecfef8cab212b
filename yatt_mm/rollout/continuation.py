"""A task as far as it has come: what earlier attempts sampled, what is left to sample, and how the two are joined.

A group may be cut off any number of times and go on elsewhere, or under newer weights: every token keeps the
log-probability and the policy version of the weights that gave it. Pure values; refs and the engine are `worker`'s.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One task, its prompt, and the samples that it starts from."""

    task: PromptTask
    sampling: SamplingSettings
    prompt: list[int]
    earlier: tuple[SampleRecord, ...]
    """[G] as the last attempt left them; without a token where there was none."""

    @property
    def unfinished(self) -> list[int]:
        """Samples that go on: they were cut off, and have room for more tokens."""
        return [i for i, sample in enumerate(self.earlier) if sample.finish_reason == "abort" and not self._is_full(i)]

    def request(self, media: tuple[Medium, ...]) -> GenerateRequest:
        """What the engine is asked: the unfinished samples, each from where it stopped."""
        unfinished = self.unfinished
        return GenerateRequest(
            prompt_token_ids=self.prompt,
            media=media,
            seeds=tuple(self._seed(sample) for sample in unfinished),
            max_tokens=self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            greedy=self.sampling.greedy,
            begun=tuple(tuple(self.earlier[sample].token_ids.tolist()) for sample in unfinished),
        )

    def joined(self, sampled: Sequence[Sampled], decode: Callable[[list[int]], str]) -> GroupRecord:
        """The whole group. `sampled`: of the unfinished samples, in order; `decode`: a response's text from its ids."""
        new = dict(zip(self.unfinished, sampled, strict=True))
        samples = [
            _continued(sample, new[i], decode) if i in new else self._closed(i) for i, sample in enumerate(self.earlier)
        ]
        return GroupRecord(prompt_token_ids=np.array(self.prompt, dtype=np.int64), samples=tuple(samples))

    def _is_full(self, sample: int) -> bool:
        return len(self.earlier[sample].token_ids) >= self.sampling.max_tokens

    def _closed(self, index: int) -> SampleRecord:
        sample = self.earlier[index]
        return dataclasses.replace(sample, finish_reason="length") if sample.finish_reason == "abort" else sample

    def _seed(self, sample: int) -> int:
        """Of its next token: a sample that goes on must not draw the same numbers again."""
        seed = sample_seed(self.task.seed, sample)
        num_tokens = len(self.earlier[sample].token_ids)
        return sample_seed(seed, num_tokens) if num_tokens else seed


def begin(task: PromptTask, sampling: SamplingSettings, prompt: list[int], partial: GroupRecord | None) -> Continuation:
    """The task at its start, or where `partial` ended.

    Raises:
        ValueError: `partial` is of another prompt, or has another number of samples.
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
    """The seed of one sample: depends on the group's seed and the sample's index alone. 31 bits."""
    digest = hashlib.blake2b(f"{group_seed} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _continued(earlier: SampleRecord, sampled: Sampled, decode: Callable[[list[int]], str]) -> SampleRecord:
    token_ids = np.concatenate([earlier.token_ids, np.array(sampled.token_ids, dtype=np.int64)])
    return SampleRecord(
        token_ids=token_ids,
        logprobs=np.concatenate([earlier.logprobs, np.array(sampled.logprobs, dtype=np.float32)]),
        policy_versions=np.concatenate([earlier.policy_versions, np.array(sampled.policy_versions, dtype=np.int64)]),
        text=decode(token_ids.tolist()) if len(earlier.token_ids) else sampled.text,
        finish_reason=sampled.finish_reason,
    )
