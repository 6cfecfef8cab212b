"""Have generative reward models judge a controller's answered groups: refs and texts out, scores back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from yatt_mm.config import Config
from yatt_mm.control.calls import fetch
from yatt_mm.control.generation import CHUNK_SIZE, prompt_seed
from yatt_mm.control.messages import ScoredGroup, Team
from yatt_mm.control.metrics import Meter
from yatt_mm.errors import WorkerError
from yatt_mm.genrm.messages import JudgedGroup, JudgeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    judge: str
    engine: int
    groups: tuple[int, ...]
    """Places in the list of groups."""


class Judging:
    """The judges' half of a controller's step."""

    def __init__(self, controller: int, config: Config, team: Team) -> None:
        self._controller = controller
        self._config = config
        self._team = team

    def run(
        self, groups: Sequence[ScoredGroup], *, phase: str, meter: Meter, on_progress: Callable[[], object]
    ) -> list[ScoredGroup]:
        """The groups with the judges' weighted scores added to their rewards.

        Raises:
            WorkerError: an engine of a judge failed, or finished nothing for `controllers.deadline_s`.
        """
        tasks = [self._task(group) for group in groups]
        pending = {call: work for name in self._team.judges for call, work in self._calls(name, tasks, phase)}
        rewards = [list(group.rewards) for group in groups]
        deadline_s = self._config.controllers.deadline_s
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=deadline_s)
            if not done:
                names = sorted({self._team.judge_name(work.judge, work.engine) for work in pending.values()})
                raise WorkerError(f"{', '.join(names)} finished nothing of {phase} for {deadline_s:g} s")
            on_progress()
            work = pending.pop(done[0])
            judged: list[JudgedGroup] = fetch(
                done[0], name=self._team.judge_name(work.judge, work.engine), what=f"the verdicts of {phase}"
            )
            weight = self._config.reward.judges[work.judge].weight
            for place, verdicts in zip(work.groups, judged, strict=True):
                rewards[place] = [sum(pair) for pair in zip(rewards[place], (weight * s for s in verdicts.scores))]
                _count(meter, work.judge, verdicts)
        return [replace(group, rewards=tuple(reward)) for group, reward in zip(groups, rewards)]

    def _calls(self, judge: str, tasks: Sequence[JudgeTask], phase: str) -> list[tuple[Any, _Call]]:
        engines = self._team.judges[judge]
        by_engine: list[list[int]] = [[] for _ in engines]
        for place, task in enumerate(tasks):
            by_engine[task.group.slot % len(engines)].append(place)
        if self._config.rollout.deterministic:  # every engine hears from every controller
            chunks = [(engine, places) for engine, places in enumerate(by_engine)]
        else:
            chunks = [
                (engine, places[begin : begin + CHUNK_SIZE])
                for engine, places in enumerate(by_engine)
                for begin in range(0, len(places), CHUNK_SIZE)
            ]
        calls = []
        for engine, places in chunks:
            part = [tasks[place] for place in places]
            if self._config.rollout.deterministic:
                call = engines[engine].judge_together.remote(phase, self._controller, part)
            else:
                call = engines[engine].judge.remote(part)
            calls.append((call, _Call(judge=judge, engine=engine, groups=tuple(places))))
        return calls

    def _task(self, group: ScoredGroup) -> JudgeTask:
        prompt = group.prompt
        return JudgeTask(
            group=group.group,
            question=prompt.question,
            answer=prompt.answer,
            fields=prompt.fields,
            seed=prompt_seed(self._config.run.seed, prompt, purpose="judge"),
        )


def _count(meter: Meter, judge: str, judged: JudgedGroup) -> None:
    meter.add_sum("genrm/num_judged", len(judged.scores))
    meter.add_sum("genrm/num_failed", judged.num_failed)
    meter.add_sum("genrm/num_retried", judged.num_retried)
    meter.add_mean(f"genrm/{judge}_mean", sum(judged.scores), len(judged.scores))
