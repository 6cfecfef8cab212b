"""The first stage of a generation phase: engines of the policy sample responses, and continue those that were cut
off."""

from __future__ import annotations

import asyncio

from yatt_mm.generation.group_work import GroupWork, prompt_seed
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.tick_batch import TickBatch
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings

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
        self._sampled: TickBatch[int, PromptTask, GroupRef] = TickBatch(
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

    def _take(self, work: GroupWork, group: GroupRef) -> None:
        if work.group is not None:
            self._context.client.release([work.group.ref])
        work.group = group

    async def _generate(self, engine: int, tasks: list[PromptTask]) -> list[GroupRef]:
        context, actor = self._context, self._context.team.engines[engine]
        if context.is_deterministic:
            call = actor.generate_together.remote(context.name, context.controller, tasks, self._sampling)
        else:
            call = actor.generate.remote(tasks, self._sampling)
        groups: list[GroupRef] = await context.calls.reply(
            call, name=context.team.engine_name(engine), what=context.name
        )
        return groups

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
