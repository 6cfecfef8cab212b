"""The first stage of a generation phase: engines of the policy sample responses, and continue those that were cut
off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from yatt_mm.generation.group_work import CHUNK_SIZE, EngineQueue, GroupWork, PhaseContext, prompt_seed
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings

POOL = str(Role.ROLLOUT)


class RolloutStage:
    """Sends groups to engines of the policy.

    Consumes: prompts. Produces: groups with all responses, as each call to an engine ends.
    """

    def __init__(
        self,
        context: PhaseContext,
        sampling: SamplingSettings,
        *,
        num_samples: int,
        on_answered: Callable[[list[GroupWork]], None],
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self._context = context
        self._sampling = sampling
        self._num_samples = num_samples
        self._on_answered = on_answered
        self._queue = EngineQueue(context, POOL, self._send, chunk_size=chunk_size)
        self._sent: dict[int, list[PromptTask]] = {}
        """[engine] the tasks that it has."""
        self._is_stopping = False

    @property
    def num_sent(self) -> int:
        """The number of groups that engines have."""
        return sum(map(len, self._sent.values()))

    def add(self, works: Sequence[GroupWork]) -> None:
        """Take groups that need responses. Groups that have all responses pass through."""
        answered = [work for work in works if work.is_answered]
        unanswered = [work for work in works if not work.is_answered]
        if self._context.is_deterministic:
            for engine, share in self._context.shares(POOL, unanswered).items():
                self._send(engine, share)
        else:
            self._queue.add(unanswered)
        if answered:
            self._on_answered(answered)

    def stop(self) -> None:
        """Cut everything off: waiting groups are not sent, and engines give groups back with the tokens that they
        have."""
        self._is_stopping = True
        self._queue.clear()
        for engine, tasks in self._sent.items():
            if tasks:
                self._context.team.engines[engine].abort.remote([task.name for task in tasks])

    def _send(self, engine: int, works: list[GroupWork]) -> None:
        context = self._context
        tasks = [self._task(work) for work in works]
        self._sent[engine] = self._sent.get(engine, []) + tasks
        actor = context.team.engines[engine]
        if context.is_deterministic:
            call = actor.generate_together.remote(context.name, context.controller, tasks, self._sampling)
        else:
            call = actor.generate.remote(tasks, self._sampling)

        def take(groups: list[GroupRef]) -> None:
            self._sent[engine] = [task for task in self._sent[engine] if task not in tasks]
            self._take(engine, works, groups)

        context.pending.then(call, take, name=context.team.engine_name(engine), what=context.name)

    def _take(self, engine: int, works: list[GroupWork], groups: list[GroupRef]) -> None:
        for work, group in zip(works, groups, strict=True):
            if work.group is not None:
                self._context.client.release([work.group.ref])
            work.group = group
        answered = [work for work in works if work.is_answered]
        if not self._context.is_deterministic:
            self._queue.finish(engine, len(works), num_ended=len(answered))
        if self._is_stopping:
            return
        if answered:
            self._on_answered(answered)
        if len(answered) < len(works):  # the engine was put to sleep: other engines continue
            self._queue.add([work for work in works if not work.is_answered])

    def _task(self, work: GroupWork) -> PromptTask:
        prompt, context = work.prompt, self._context
        part = f".{work.num_parts}" if work.num_parts else ""
        work.num_parts += 1
        return PromptTask(
            slot=prompt.slot.position,
            question=prompt.question,
            media=prompt.media,
            num_samples=self._num_samples,
            seed=prompt_seed(context.config.run.seed, prompt),
            name=f"rollout/{context.team.run_id}/{context.name}/{prompt.slot.position}{part}",
            partial=work.group.ref if work.group is not None else None,
        )
