"""Generation phases in rounds: all controllers together sample and score all groups of a list, or judge all groups of a
list.

`yatt_mm.generation.streaming` is the other way: groups flow from stage to stage, and further prompts come in.
"""

from __future__ import annotations

from collections.abc import Sequence

from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.judge_stage import JudgeStage
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.reward_stage import RewardStage
from yatt_mm.generation.rollout_stage import RolloutStage
from yatt_mm.protocol.control import Prompt
from yatt_mm.protocol.rollout import SamplingSettings
from yatt_mm.protocol.step_meter import StepMeter


async def answer(
    prompts: Sequence[Prompt], sampling: SamplingSettings, context: PhaseContext, *, num_samples: int
) -> list[GroupWork]:
    """Return the groups of the prompts with responses and rewards, in the order of the prompts.

    Raises:
        WorkerError: an engine or a reward worker failed or was late.
    """
    # an engine gets as many responses with a call as in training, however few a group has
    chunk_size = max(CHUNK_SIZE, CHUNK_SIZE * context.config.rollout.group_size // num_samples)
    rollout = RolloutStage(context, sampling, num_samples=num_samples, chunk_size=chunk_size)
    rewards = RewardStage(context)

    async def follow(work: GroupWork) -> None:
        await rollout.sample(work)
        await rewards.score(work)

    works = [GroupWork(prompt=prompt) for prompt in prompts]
    rollout.expect(len(works))
    for work in works:
        context.calls.start(follow(work))
    await context.calls.finish()
    return works


async def judge(works: Sequence[GroupWork], meter: StepMeter, context: PhaseContext) -> None:
    """Add the judges' scores to the rewards of the groups.

    Raises:
        WorkerError: an engine of a judge failed or was late.
    """
    stage = JudgeStage(context, meter)
    stage.expect(len(works))
    for work in works:
        context.calls.start(stage.judge(work))
    await context.calls.finish()
