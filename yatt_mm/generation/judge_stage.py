"""The third stage of a generation phase: judges score groups, and another engine judges those whose engine was put to
sleep.

Refs and texts go out, scores come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from yatt_mm.generation.group_work import CHUNK_SIZE, EngineQueue, GroupWork, PhaseContext, prompt_seed
from yatt_mm.generation.metrics import StepMeter
from yatt_mm.protocol.genrm import JudgedGroup, JudgeTask


class JudgeStage:
    """Sends groups to the judges' engines.

    Consumes: scored groups. Produces: the same groups with the judges' weighted scores added to their rewards.
    """

    def __init__(
        self,
        context: PhaseContext,
        meter: StepMeter,
        on_judged: Callable[[list[GroupWork]], None],
        *,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self._context = context
        self._meter = meter
        self._on_judged = on_judged
        self._queues = {judge: self._queue_of(judge, chunk_size) for judge in context.team.judges}

    def add(self, works: Sequence[GroupWork]) -> None:
        """Take groups that the reward function has scored."""
        weight = self._context.config.reward.weight
        for work in works:
            self._meter.add_mean("reward/function_mean", sum(work.rewards), len(work.rewards))
            work.rewards = [weight * reward for reward in work.rewards]
            work.scores = {}
        for judge, queue in self._queues.items():
            if self._context.is_deterministic:
                for engine, share in self._context.shares(judge, works).items():
                    self._send(judge, engine, share)
            else:
                queue.add(works)

    def _queue_of(self, judge: str, chunk_size: int) -> EngineQueue:
        def send(engine: int, works: list[GroupWork]) -> None:
            self._send(judge, engine, works)

        return EngineQueue(self._context, judge, send, chunk_size=chunk_size)

    def _send(self, judge: str, engine: int, works: list[GroupWork]) -> None:
        context = self._context
        actor, tasks = context.team.judges[judge][engine], [self._task(work) for work in works]
        if context.is_deterministic:
            call = actor.judge_together.remote(context.name, context.controller, tasks)
        else:
            call = actor.judge.remote(tasks)

        def take(judged: list[JudgedGroup | None]) -> None:
            self._take(judge, engine, works, judged)

        context.pending.then(
            call, take, name=context.team.judge_name(judge, engine), what=f"the verdicts of {context.name}"
        )

    def _take(self, judge: str, engine: int, works: list[GroupWork], judged: list[JudgedGroup | None]) -> None:
        interrupted = [work for work, verdicts in zip(works, judged, strict=True) if verdicts is None]
        through = []
        for work, verdicts in zip(works, judged):
            if verdicts is None:  # the engine was put to sleep: another one judges
                continue
            work.scores[judge] = verdicts.scores
            _count(self._meter, judge, verdicts)
            if len(work.scores) == len(self._queues):
                self._add_up(work)
                through.append(work)
        if not self._context.is_deterministic:
            self._queues[judge].finish(engine, len(works), num_ended=len(works) - len(interrupted))
        if through:
            self._on_judged(through)
        if interrupted:
            self._queues[judge].add(interrupted)

    def _add_up(self, work: GroupWork) -> None:
        """Add the scores up in the order of the config, so that the sum has the same bits in any order of judging."""
        for judge in self._queues:
            weight = self._context.config.reward.judges[judge].weight
            work.rewards = [reward + weight * score for reward, score in zip(work.rewards, work.scores[judge])]

    def _task(self, work: GroupWork) -> JudgeTask:
        prompt = work.prompt
        assert work.group is not None
        return JudgeTask(
            group=work.group,
            question=prompt.question,
            answer=prompt.answer,
            fields=prompt.fields,
            seed=prompt_seed(self._context.config.run.seed, prompt, purpose="judge"),
        )


def _count(meter: StepMeter, judge: str, judged: JudgedGroup) -> None:
    meter.add_sum("genrm/num_judged", len(judged.scores))
    meter.add_sum("genrm/num_failed", judged.num_failed)
    meter.add_sum("genrm/num_retried", judged.num_retried)
    meter.add_sum("genrm/num_tokens", judged.num_tokens)
    meter.add_mean(f"genrm/{judge}_mean", sum(judged.scores), len(judged.scores))
