"""The first stage of a generation phase: engines of the policy sample responses, and continue those that were cut
off. If an engine dies, others take over its groups, with the tokens that are known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.generation.group_work import GroupWork, prompt_seed
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.tick_batch import TickBatch
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.engine_types import EngineAsleepError, EngineError, MediaDroppedError

logger = logging.getLogger(__name__)

POOL = str(Role.ROLLOUT)


class RolloutStage:
    """Has engines of the policy sample the responses of groups."""

    def __init__(
        self, context: PhaseContext, sampling: SamplingSettings, *, num_samples: int, chunk_size: int = CHUNK_SIZE
    ) -> None:
        """`chunk_size`: the most groups of one call to an engine. The call comes back with its slowest group."""
        self._context = context
        self._sampling = sampling
        self._num_samples = num_samples
        self._engines = context.engines(POOL)
        self._sampled: TickBatch[int, PromptTask, GroupRef | None] = TickBatch(
            context.calls, self._generate, max_items=None if context.is_deterministic else chunk_size
        )
        self._aborted: TickBatch[int, str, None] = TickBatch(context.calls, self._abort)

    def expect(self, num_groups: int) -> None:
        """In a deterministic phase: make one call to every engine when these groups have come, also to an engine
        without a group. An engine begins when every controller has called it."""
        if self._context.is_deterministic:
            self._sampled.hold(self._context.awake[POOL], num_groups)

    async def sample(self, work: GroupWork) -> None:
        """Give the group all its responses.

        An engine that is put to sleep gives the group back with the tokens so far, and another engine continues it. If
        this coroutine is cancelled, the engine ends the group now, and the group keeps the tokens that it has.
        """
        while not work.is_answered:
            engine = await self._engines.acquire(work)
            try:
                await self._sample_on(engine, work)
            finally:
                self._engines.give_back(engine, is_done=work.is_answered)

    async def _sample_on(self, engine: int, work: GroupWork) -> None:
        task = self._task(work)
        sampled = self._sampled.add(engine, task)
        try:
            await asyncio.shield(sampled)
        except asyncio.CancelledError:
            if self._context.calls.is_over:
                raise
            self._aborted.add(engine, task.name)
            await sampled  # the engine returns what it has; the future is cancelled if the whole phase ends
            raise
        finally:
            if sampled.done() and not sampled.cancelled():
                self._take(work, sampled.result())

    def _take(self, work: GroupWork, group: GroupRef | None) -> None:
        if group is None:
            return  # its engine was lost, and it goes on from the tokens that it had before
        if work.group is not None:
            self._context.client.release([work.group.ref])
        work.group = group

    async def _generate(self, engine: int, tasks: list[PromptTask]) -> Sequence[GroupRef | None]:
        """Return the groups that an engine gives back; None for each if it is lost and others are there."""
        context, actor = self._context, self._context.team.engines[engine]
        if context.is_deterministic:
            call = actor.generate_together.remote(context.name, context.controller, tasks, self._sampling)
        else:
            call = actor.generate.remote(tasks, self._sampling)
        name = context.team.engine_name(engine)
        try:
            groups: list[GroupRef] = await context.calls.reply(call, name=name, what=context.name)
            return groups
        except WorkerError as error:
            if context.is_deterministic or not _is_lost(error) or not await self._go_on_without(engine):
                raise
            logger.warning("%s; other engines take over its %d groups", error, len(tasks))
            return [None] * len(tasks)

    async def _go_on_without(self, engine: int) -> bool:
        """Let the coordinator give no group to an engine any more. Return False if no other one is awake."""
        context = self._context
        call = context.coordinator.lose(context.number, POOL, engine)
        return await context.calls.reply(call, name="the coordinator", what=f"going on without engine {engine}")

    async def _abort(self, engine: int, names: list[str]) -> list[None]:
        self._context.team.engines[engine].abort.remote(names)
        return [None] * len(names)

    def _task(self, work: GroupWork) -> PromptTask:
        prompt, context = work.prompt, self._context
        part = f".{work.num_parts}" if work.num_parts else ""
        work.num_parts += 1
        return PromptTask(
            slot=prompt.slot.position,
            conversation=prompt.conversation,
            media=prompt.media,
            num_samples=self._num_samples,
            seed=prompt_seed(context.config.run.seed, prompt),
            name=f"rollout/{context.team.run_id}/{context.name}/{prompt.slot.position}{part}",
            partial=work.group.ref if work.group is not None else None,
        )


def _is_lost(error: WorkerError) -> bool:
    """Return True if an error says that the engine itself is of no use any more: its actor or its process died, or it
    hangs."""
    cause = error.__cause__
    reason = getattr(cause, "cause", None)
    is_alive = isinstance(reason, (EngineAsleepError, MediaDroppedError))
    return isinstance(cause, ray.exceptions.RayActorError) or (isinstance(reason, EngineError) and not is_alive)
