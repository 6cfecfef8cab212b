"""A controller's generation phases where everybody works through the same list: answer and score it, or judge it.

`yatt_mm.generation.streaming` is the other way: groups flow from stage to stage, and further prompts come in.
"""

from __future__ import annotations

from collections.abc import Sequence

from yatt_mm.generation.group_work import Desk, Work
from yatt_mm.generation.judge_stage import Judging
from yatt_mm.generation.metrics import Meter
from yatt_mm.generation.reward_stage import Scoring
from yatt_mm.generation.rollout_stage import Answering
from yatt_mm.protocol.control import Prompt, ScoredGroup
from yatt_mm.protocol.rollout import Sampling


def answer(desk: Desk, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int) -> list[Work]:
    """[prompt] answered and scored groups, in the run's order.

    Raises:
        WorkerError: an engine or a reward worker failed or was late.
    """
    done: list[Work] = []
    scoring = Scoring(desk, done.extend)
    answering = Answering(desk, sampling, num_samples=num_samples, on_answered=scoring.add)
    answering.add([Work(prompt=prompt) for prompt in prompts])
    desk.pending.run(lambda: desk.pending.is_empty, on_late=scoring.restart_late)
    return in_order(done)


def judge(desk: Desk, works: Sequence[Work], meter: Meter) -> list[Work]:
    """The groups with the judges' scores in their rewards, in the run's order.

    Raises:
        WorkerError: an engine of a judge failed or was late.
    """
    done: list[Work] = []
    Judging(desk, meter, done.extend).add(works)
    desk.pending.run(lambda: desk.pending.is_empty)
    return in_order(done)


def in_order(works: Sequence[Work]) -> list[Work]:
    """By their place in the run's order of prompts."""
    return sorted(works, key=lambda work: work.prompt.slot.position)


def scored(works: Sequence[Work]) -> list[ScoredGroup]:
    """What training and metrics want of them."""
    return [work.scored() for work in works]
