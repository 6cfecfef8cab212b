"""The body of a rollout actor: templates, tokenises, resolves refs, samples, and stores what it sampled.

Consumes: `PromptTask`s (refs, no pixels).  Produces: one plain object of the data plane per group, and its `GroupRef`.
Waits for: the data plane and the engine, each within the spec's deadline.  Unblocked by: their answers or their end.
Left out: Ray and the meeting of controllers (`actor`).
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from dataplane.client import Client
from dataplane.reader import Reader
from dataplane.refs import Ref
from yatt_mm.rollout import record
from yatt_mm.rollout.engine import Engine
from yatt_mm.rollout.messages import EngineSpec, GroupRef, PromptTask, Sampling
from yatt_mm.rollout.prompts import PromptTemplate
from yatt_mm.rollout.requests import EngineConfig, GenerateRequest, MediaDroppedError, Medium, Sampled
from yatt_mm.weights.published import Published

T = TypeVar("T")

logger = logging.getLogger(__name__)

NUM_IO_THREADS = 8
"""Calls to the data plane that may be under way at the same time."""


class RolloutWorker:
    """An engine and its connections to the data plane."""

    def __init__(
        self, engine: Engine, client: Client, reader: Reader, *, scope: str | None = None, durable: bool = False
    ) -> None:
        """`scope` is open at the node, and kept open by `client` among others; `durable` as of `Client.put`."""
        self.engine = engine
        self._durable = durable
        self._scope = scope
        self._client = client
        self._reader = reader
        self._template = PromptTemplate(engine.tokenizer, engine.image_token_id)
        self._io = ThreadPoolExecutor(NUM_IO_THREADS, thread_name_prefix="rollout-io")
        self._num_groups = 0
        self._num_tokens = 0
        self._num_resent = 0

    @classmethod
    async def start(cls, spec: EngineSpec, dataplane_uri: str) -> "RolloutWorker":
        """Connect, and start the engine."""
        config = EngineConfig(
            model_dir=spec.model_dir,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            kv_cache_bytes=spec.kv_cache_bytes,
            max_images_per_prompt=spec.max_images_per_prompt,
            answer_timeout_s=spec.deadline_s,
        )
        client = Client(dataplane_uri, timeout_s=spec.deadline_s)
        reader = Reader(dataplane_uri, timeout_s=spec.deadline_s)
        try:
            client.open_scope(spec.scope)
            return cls(await Engine.start(config), client, reader, scope=spec.scope, durable=spec.durable)
        except BaseException:
            reader.close()
            client.close()
            raise

    async def generate(self, task: PromptTask, sampling: Sampling) -> GroupRef:
        """Answer one task together with whatever else the engine is doing."""
        prompt = self._token_ids(task)
        # The requests are made inside the calls: nothing here keeps their views while the engine computes.
        try:
            samples = await self.engine.generate((await self._requests([task], [prompt], sampling)).pop())
        except MediaDroppedError as error:
            self._note_resent(error)
            samples = await self.engine.generate((await self._requests([task], [prompt], sampling)).pop())
        return await self._store(task, prompt, samples)

    async def generate_batch(self, tasks: Sequence[PromptTask], sampling: Sampling) -> list[GroupRef]:
        """Answer all tasks as one batch: the same list gives the same bits."""
        prompts = [self._token_ids(task) for task in tasks]
        try:
            groups = await self.engine.generate_batch(await self._requests(tasks, prompts, sampling))
        except MediaDroppedError as error:
            self._note_resent(error)
            groups = await self.engine.generate_batch(await self._requests(tasks, prompts, sampling))
        stored = (self._store(*group) for group in zip(tasks, prompts, groups, strict=True))
        return list(await asyncio.gather(*stored))  # together: the node's disk takes many at the cost of one

    async def update_weights(self, published: Published) -> None:
        """Take published weights."""
        await self.engine.update_weights(published)

    def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        return {
            "ipc_bytes": self.engine.num_ipc_bytes,
            "num_groups": self._num_groups,
            "num_tokens": self._num_tokens,
            "num_resent": self._num_resent,
            "policy_version": self.engine.policy_version,
        }

    async def shutdown(self) -> None:
        """End the engine and the connections."""
        try:
            await self.engine.shutdown()
        finally:
            self._io.shutdown(wait=False, cancel_futures=True)
            self._reader.close()
            self._client.close()

    def _token_ids(self, task: PromptTask) -> list[int]:
        return self._template.token_ids(task.question, [int(_meta(ref, "num_tokens")) for ref in task.media])

    async def _requests(
        self, tasks: Sequence[PromptTask], prompts: Sequence[list[int]], sampling: Sampling
    ) -> list[GenerateRequest]:
        """Requests over leased views: the leases last until the engine has been sent what they show."""
        refs = [ref for task in tasks for ref in task.media]
        views = iter(await self._call(lambda: self._reader.resolve(refs)))
        return [
            GenerateRequest(
                prompt_token_ids=prompt,
                media=tuple(medium_of(ref, next(views)) for ref in task.media),
                seeds=tuple(sample_seed(task.seed, sample) for sample in range(task.num_samples)),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                greedy=sampling.greedy,
            )
            for task, prompt in zip(tasks, prompts, strict=True)
        ]

    async def _store(self, task: PromptTask, prompt: list[int], samples: Sequence[Sampled]) -> GroupRef:
        group = record.GroupRecord(
            prompt_token_ids=np.array(prompt, dtype=np.int64),
            samples=tuple(_record(sampled) for sampled in samples),
        )
        ref = await self._call(
            lambda: self._client.put(record.encode(group), name=task.name, scope=self._scope, durable=self._durable)
        )
        self._num_groups += 1
        self._num_tokens += sum(len(sampled.token_ids) for sampled in samples)
        return GroupRef(
            slot=task.slot,
            ref=ref,
            media=task.media,
            num_prompt_tokens=len(prompt),
            lengths=tuple(len(sampled.token_ids) for sampled in samples),
            policy_versions=tuple(self._version_range(sampled) for sampled in samples),
            finish_reasons=tuple(sampled.finish_reason for sampled in samples),
        )

    def _version_range(self, sampled: Sampled) -> tuple[int, int]:
        """Lowest and highest version; a sample that was aborted before its first token has the current one."""
        versions = sampled.policy_versions or (self.engine.policy_version,)
        return min(versions), max(versions)

    def _note_resent(self, error: MediaDroppedError) -> None:
        self._num_resent += 1
        logger.warning("%s; done", error)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io, function)


def sample_seed(group_seed: int, sample: int) -> int:
    """The seed of one sample: depends on the group's seed and the sample's index alone. 31 bits."""
    digest = hashlib.blake2b(f"{group_seed} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def medium_of(ref: Ref, view: np.ndarray) -> Medium:
    """What an engine is told of a resolved medium. Raises ValueError where the ref is not one of derived patches."""
    temporal, height, width = _meta(ref, "grid_thw")
    return Medium(digest=ref.name, patches=view, grid_thw=(temporal, height, width))


def _meta(ref: Ref, key: str) -> Any:
    if key not in ref.meta:
        raise ValueError(
            f"ref {ref.name} ({ref.kind}) says nothing about its {key}; a rollout wants derived patches: send the refs "
            "that the data plane's derive gave"
        )
    return ref.meta[key]


def _record(sampled: Sampled) -> record.SampleRecord:
    return record.SampleRecord(
        token_ids=np.array(sampled.token_ids, dtype=np.int64),
        logprobs=np.array(sampled.logprobs, dtype=np.float32),
        policy_versions=np.array(sampled.policy_versions, dtype=np.int64),
        text=sampled.text,
        finish_reason=sampled.finish_reason,
    )
