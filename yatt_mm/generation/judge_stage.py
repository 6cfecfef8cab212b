"""The third stage of a generation phase: judges score groups, and another engine judges those whose engine was put to
sleep.

Refs and texts go out, scores come back.
"""

from __future__ import annotations

import asyncio
from functools import partial

from yatt_mm.generation.group_work import GroupWork, prompt_seed
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.tick_batch import TickBatch
from yatt_mm.protocol.faults import Failures
from yatt_mm.protocol.genrm import JudgedGroup, JudgeTask
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.step_meter import StepMeter


class JudgeStage:
    """Has the judges' engines score groups."""

    def __init__(self, context: PhaseContext, meter: StepMeter, *, chunk_size: int = CHUNK_SIZE) -> None:
        """`chunk_size`: the most groups of one call to an engine. The call comes back with its slowest group."""
        self._context = context
        self._meter = meter
        self._engines = {judge: context.engines(judge) for judge in context.team.judges}
        self._judged: dict[str, TickBatch[int, JudgeTask, JudgedGroup | None]] = {
            judge: TickBatch(
                context.calls, partial(self._ask, judge), max_items=None if context.is_deterministic else chunk_size
            )
            for judge in context.team.judges
        }

    def expect(self, num_groups: int) -> None:
        """In a deterministic phase: make one call to every engine when these groups have come, also to an engine
        without a group. An engine begins when every controller has called it."""
        if self._context.is_deterministic:
            for judge, batch in self._judged.items():
                batch.hold(self._context.awake[judge], num_groups)

    async def judge(self, work: GroupWork) -> None:
        """Set the rewards of the group: the weighted sum of the reward function's scores and the judges' scores."""
        reward = self._context.config.reward
        self._meter.add_mean("reward/function_mean", sum(work.rewards), len(work.rewards))
        task = self._task(work)
        verdicts = await asyncio.gather(*(self._judge_by(judge, work, task) for judge in self._engines))
        work.rewards = [reward.weight * value for value in work.rewards]
        for judge, judged in zip(self._engines, verdicts):  # in the order of the config, so that the sum has one value
            weight, source = reward.judges[judge].weight, f"reward.judges.{judge}"
            work.rewards = [value + weight * score for value, score in zip(work.rewards, judged.scores, strict=True)]
            work.scores.append(Scores(source=source, values=judged.scores, words=judged.words))
            if judged.fault is not None:
                work.failures.append(Failures(source=source, num=judged.num_failed, fault=judged.fault))

    async def _judge_by(self, judge: str, work: GroupWork, task: JudgeTask) -> JudgedGroup:
        """Return the verdicts of one judge. An engine that is put to sleep gives the group back, and another one judges
        it."""
        engines, judged = self._engines[judge], None
        while judged is None:
            engine = await engines.acquire(work)
            judged = await self._judged[judge].add(engine, task)
            engines.give_back(engine, is_done=judged is not None)
        _count(self._meter, judge, judged)
        return judged

    async def _ask(self, judge: str, engine: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        context, actor = self._context, self._context.team.judges[judge][engine]
        if context.is_deterministic:
            call = actor.judge_together.remote(context.name, context.controller, tasks)
        else:
            call = actor.judge.remote(tasks)
        judged: list[JudgedGroup | None] = await context.calls.reply(
            call, name=context.team.judge_name(judge, engine), what=f"the verdicts of {context.name}"
        )
        return judged

    def _task(self, work: GroupWork) -> JudgeTask:
        prompt, config = work.prompt, self._context.config
        assert work.group is not None
        return JudgeTask(
            group=work.group,
            question=prompt.question,
            answer=prompt.answer,
            fields=prompt.fields,
            seed=prompt_seed(config.run.seed, prompt, purpose="judge"),
            keeps_words=config.rollouts.keeps(prompt.slot.position, config.train.prompts_per_step),
        )


def _count(meter: StepMeter, judge: str, judged: JudgedGroup) -> None:
    meter.add_sum("genrm/num_judged", len(judged.scores))
    meter.add_sum("genrm/num_failed", judged.num_failed)
    meter.add_sum("genrm/num_retried", judged.num_retried)
    meter.add_sum("genrm/num_tokens", judged.num_tokens)
    meter.add_mean(f"genrm/{judge}_mean", sum(judged.scores), len(judged.scores))
    meter.add_mean(f"genrm/{judge}_failed_frac", judged.num_failed, len(judged.scores))
