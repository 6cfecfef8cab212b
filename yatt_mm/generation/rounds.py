"""Generation phases in rounds: all controllers work through one list, and sample and score it, or judge it.

`yatt_mm.generation.streaming` is the other way: groups flow from stage to stage, and further prompts come in.
"""

from __future__ import annotations

from collections.abc import Sequence

from yatt_mm.generation.group_work import GroupWork, PhaseContext
from yatt_mm.generation.judge_stage import JudgeStage
from yatt_mm.generation.metrics import StepMeter
from yatt_mm.generation.reward_stage import RewardStage
from yatt_mm.generation.rollout_stage import RolloutStage
from yatt_mm.protocol.control import Prompt, ScoredGroup
from yatt_mm.protocol.rollout import SamplingSettings


def answer(
    context: PhaseContext, prompts: Sequence[Prompt], sampling: SamplingSettings, *, num_samples: int
) -> list[GroupWork]:
    """Return the groups of the prompts with responses and rewards, in the run's order.

    Raises:
        WorkerError: an engine or a reward worker failed or was late.
    """
    done: list[GroupWork] = []
    scoring = RewardStage(context, done.extend)
    answering = RolloutStage(context, sampling, num_samples=num_samples, on_answered=scoring.add)
    answering.add([GroupWork(prompt=prompt) for prompt in prompts])
    context.pending.run(lambda: context.pending.is_empty, on_late=scoring.restart_late)
    return in_order(done)


def judge(context: PhaseContext, works: Sequence[GroupWork], meter: StepMeter) -> list[GroupWork]:
    """Return the groups with the judges' scores added to their rewards, in the run's order.

    Raises:
        WorkerError: an engine of a judge failed or was late.
    """
    done: list[GroupWork] = []
    JudgeStage(context, meter, done.extend).add(works)
    context.pending.run(lambda: context.pending.is_empty)
    return in_order(done)


def in_order(works: Sequence[GroupWork]) -> list[GroupWork]:
    """Return the groups, sorted by their place in the run's order of prompts."""
    return sorted(works, key=lambda work: work.prompt.slot.position)


def scored(works: Sequence[GroupWork]) -> list[ScoredGroup]:
    """Return the part of the groups that training and metrics need."""
    return [work.scored() for work in works]
