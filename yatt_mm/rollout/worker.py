"""The rollout worker: makes prompts, resolves their media, samples responses, and stores the groups.

Consumes: `PromptTask`s (refs, no pixels).  Produces: one plain object of the data plane per group, and its `GroupRef`.
Waits for: the data plane and the engine, each within the spec's deadline.  Unblocked by: their replies or their end.
Left out: Ray (`actor`), and waiting for the tasks of all controllers (`batch_barrier`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import BadMediaError, BadRequestError, ChecksumError, DatasetError, MissingObjectError
from dataplane.core.refs import ArraySpec, Ref
from yatt_mm.protocol import group_record
from yatt_mm.protocol.published import Published
from yatt_mm.protocol.rollout import EngineSpec, GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.continuation import Continuation, begin_attempt
from yatt_mm.rollout.engine_media import medium_of, size_of
from yatt_mm.rollout.engine_types import (
    ABORTED,
    Cut,
    EngineAsleepError,
    EngineConfig,
    GenerateRequest,
    MediaDroppedError,
    Sampled,
)
from yatt_mm.rollout.prompt_template import PromptTemplate
from yatt_mm.rollout.tick_calls import TickCalls
from yatt_mm.rollout.vllm_engine import VllmEngine

T = TypeVar("T")

logger = logging.getLogger(__name__)

NUM_IO_THREADS = 8
"""The number of calls to the data plane that may be under way at the same time."""
MAX_RESOLVED_BYTES = 64 << 20
"""The number of bytes of objects that one call resolves: they must be in the node's memory together."""
MAX_GROUPS_PER_PUT = 32
"""The number of groups that one call stores."""
ERRORS_OF_ONE = (BadMediaError, BadRequestError, ChecksumError, DatasetError, MissingObjectError)
"""What the data plane raises if one object is at fault. Its other errors are about the node, or about time."""


class RolloutWorker:
    """An engine of the policy, with its connections to the data plane."""

    def __init__(
        self,
        engine: VllmEngine,
        client: Client,
        reader: Reader,
        *,
        scope: str | None = None,
        durable: bool = False,
        chat_template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Make a worker around a started engine.

        `scope`: the scope of the stored groups; it is open at the node, and `client` helps to keep it open. `durable`:
        see `Client.put`. `chat_template_args`: see `EngineSpec`.
        """
        self.engine = engine
        self._durable = durable
        self._scope = scope
        self._client = client
        self._reader = reader
        self._template = PromptTemplate(engine.tokenizer, engine.media_tokens, arguments=chat_template_args)
        self._io = ThreadPoolExecutor(NUM_IO_THREADS, thread_name_prefix="rollout-io")
        self._resolve = TickCalls(
            self._resolve_many,
            self._io,
            size_of=lambda refs: sum(ref.nbytes for ref in refs),
            max_size=MAX_RESOLVED_BYTES,
            errors_of_one=ERRORS_OF_ONE,
        )
        self._put = TickCalls(
            self._put_many, self._io, size_of=lambda _: 1, max_size=MAX_GROUPS_PER_PUT, errors_of_one=ERRORS_OF_ONE
        )
        self._in_hand: set[Cut] = set()
        """One cut per group that `generate` is working on."""
        self._num_groups = 0
        self._num_tokens = 0
        self._num_resent = 0

    @classmethod
    async def start(cls, spec: EngineSpec, dataplane_uri: str) -> "RolloutWorker":
        """Connect to the data plane, start the engine, and return the worker."""
        async with AsyncExitStack() as on_failure:
            client = on_failure.enter_context(Client(dataplane_uri, timeout_s=spec.deadline_s))
            reader = on_failure.enter_context(Reader(dataplane_uri, timeout_s=spec.deadline_s))
            client.open_scope(spec.scope)
            engine = await VllmEngine.start(EngineConfig.of(spec))
            on_failure.push_async_callback(engine.shutdown)
            worker = cls(
                engine,
                client,
                reader,
                scope=spec.scope,
                durable=spec.durable,
                chat_template_args=spec.chat_template_args,
            )
            on_failure.pop_all()
            return worker

    def generate(self, task: PromptTask, sampling: SamplingSettings) -> Coroutine[Any, Any, GroupRef]:
        """Sample the responses of one task, store the group, and return its ref. Continues the task's `partial`.

        The engine may compute other requests at the same time. Samples that `abort` or the engine's sleep cuts off keep
        the tokens that they have; if the engine is already asleep, this applies to the whole group. `abort` knows the
        task from the call on, even before the coroutine is awaited.
        """
        cut = Cut(name=task.name)
        self._in_hand.add(cut)
        return self._generate(task, sampling, cut)

    async def generate_batch(self, tasks: Sequence[PromptTask], sampling: SamplingSettings) -> list[GroupRef]:
        """Sample the responses of all tasks as one batch, store the groups, and return their refs, in order.

        Continues the tasks' `partial`s. The same list always gives the same bits. `abort` has no effect on a batch.

        Raises EngineAsleepError if the engine is asleep.
        """
        attempts = await asyncio.gather(*(self._begin(task, sampling) for task in tasks))
        unfinished = [attempt for attempt in attempts if attempt.unfinished]

        async def sample() -> list[list[Sampled]]:
            return await self.engine.generate_batch(await self._requests(unfinished))

        groups = iter(await self._resending(sample) if unfinished else ())
        sampled = [next(groups) if attempt.unfinished else [] for attempt in attempts]
        return list(await asyncio.gather(*map(self._store, attempts, sampled)))

    async def abort(self, names: Collection[str]) -> None:
        """End the groups of these tasks now, with the tokens that they have. Unknown names are ignored."""
        await self.engine.abort([cut for cut in self._in_hand if cut.name in names])

    async def update_weights(self, published: Published) -> None:
        """Load the published weights into the engine."""
        await self.engine.update_weights(published)

    def metrics(self) -> dict[str, float]:
        """Return totals since the start (`policy_version`: the present one)."""
        return {
            "ipc_bytes": self.engine.num_ipc_bytes,
            "num_groups": self._num_groups,
            "num_tokens": self._num_tokens,
            "num_resent": self._num_resent,
            "policy_version": self.engine.policy_version,
        }

    async def shutdown(self) -> None:
        """End the engine and close the connections."""
        try:
            await self.engine.shutdown()
        finally:
            self._io.shutdown(wait=False, cancel_futures=True)
            self._reader.close()
            self._client.close()

    def _token_ids(self, task: PromptTask) -> list[int]:
        """Return the token ids of the task's prompt."""
        return self._template.token_ids(task.conversation, [size_of(ref) for ref in task.media])

    async def _generate(self, task: PromptTask, sampling: SamplingSettings, cut: Cut) -> GroupRef:
        try:
            attempt = await self._begin(task, sampling)
            sampled = await self._sample(attempt, cut) if attempt.unfinished else []
        finally:
            self._in_hand.discard(cut)
        return await self._store(attempt, sampled)

    async def _begin(self, task: PromptTask, sampling: SamplingSettings) -> Continuation:
        """Return the attempt at a task, with the tokens that were sampled earlier (its `partial`)."""
        partial = None
        if task.partial is not None:
            (view,) = await self._resolve([task.partial])
            partial = group_record.decode(view)
        return begin_attempt(task, sampling, self._token_ids(task), partial)

    async def _sample(self, attempt: Continuation, cut: Cut) -> list[Sampled]:
        """Return the new tokens of the unfinished samples; no tokens if the engine is asleep."""

        async def sample() -> list[Sampled]:
            return await self.engine.generate((await self._requests([attempt])).pop(), cut)

        try:
            return await self._resending(sample)
        except EngineAsleepError:
            return [ABORTED] * len(attempt.unfinished)

    async def _resending(self, sample: Callable[[], Awaitable[T]]) -> T:
        """Call `sample`, and once more if the engine had dropped media.

        `sample` makes the requests itself, so that no views are kept here while the engine computes.
        """
        try:
            return await sample()
        except MediaDroppedError as error:
            self._num_resent += 1
            logger.warning("sending media again: %s", error)
        return await sample()

    async def _requests(self, attempts: Sequence[Continuation]) -> list[GenerateRequest]:
        """Return engine requests with views of media.

        The views keep their leases until the engine has received the media.
        """
        views = iter(await self._resolve([ref for attempt in attempts for ref in attempt.task.media]))
        return [
            attempt.request(tuple(medium_of(ref, next(views)) for ref in attempt.task.media)) for attempt in attempts
        ]

    async def _store(self, attempt: Continuation, sampled: Sequence[Sampled]) -> GroupRef:
        """Store the group, joined from earlier and new tokens, and return its ref and lengths."""
        task = attempt.task
        group = attempt.joined(sampled, self._text)
        ref = await self._put((task.name, group))
        self._num_groups += 1
        self._num_tokens += sum(len(new.token_ids) for new in sampled)
        return GroupRef(
            slot=task.slot,
            ref=ref,
            media=task.media,
            num_prompt_tokens=len(attempt.prompt),
            lengths=tuple(len(sample.token_ids) for sample in group.samples),
            policy_versions=tuple(self._version_range(sample) for sample in group.samples),
            finish_reasons=tuple(sample.finish_reason for sample in group.samples),
        )

    def _text(self, token_ids: list[int]) -> str:
        return str(self.engine.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _version_range(self, sample: group_record.SampleRecord) -> tuple[int, int]:
        """Return the lowest and the highest policy version of a sample's tokens.

        A sample that was cut off before its first token has the engine's present version.
        """
        versions = sample.policy_versions
        if not len(versions):
            return self.engine.policy_version, self.engine.policy_version
        return int(versions.min()), int(versions.max())

    def _resolve_many(self, wanted: Sequence[Sequence[Ref]]) -> list[list[np.ndarray]]:
        """Return the views of each list of refs."""
        views = iter(self._reader.resolve([ref for refs in wanted for ref in refs]))
        return [[next(views) for _ in refs] for refs in wanted]

    def _put_many(self, named: Sequence[tuple[str, group_record.GroupRecord]]) -> list[Ref]:
        """Store groups under their names, and return their refs."""
        data = [group_record.encode(group) for _, group in named]
        specs = [
            ArraySpec(name=name, dtype="uint8", shape=(len(encoded),))
            for (name, _), encoded in zip(named, data, strict=True)
        ]
        # against the death of the node, not of the machine
        return self._client.put_many(specs, data, scope=self._scope, durable="unsynced" if self._durable else False)
