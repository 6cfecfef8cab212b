"""Generate and score a controller's prompts: engines answer, reward workers judge each chunk as it finishes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from dataplane.client import Client
from yatt_mm.config import Config
from yatt_mm.control.calls import fetch, wait_all
from yatt_mm.control.messages import Prompt, ScoredGroup, Team
from yatt_mm.errors import WorkerError
from yatt_mm.rewards.messages import GroupRewards, RewardTask
from yatt_mm.rollout.messages import GroupRef, PromptTask, Sampling

CHUNK_SIZE = 8
"""Prompts per call to an engine when groups may finish in any order."""
POLL_S = 1.0
MAX_ATTEMPTS = 3
"""How often the rewards of a chunk are asked for when reward workers die."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    engine: int
    prompts: tuple[Prompt, ...]
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    chunk: _Chunk
    groups: tuple[GroupRef, ...]
    worker: int
    num_attempts: int

    def tasks(self) -> list[RewardTask]:
        return [
            RewardTask(group=group, answer=prompt.answer, fields=prompt.fields)
            for prompt, group in zip(self.chunk.prompts, self.groups)
        ]

    def scored(self, rewards: Sequence[GroupRewards]) -> list[ScoredGroup]:
        return [
            ScoredGroup(prompt=prompt, group=group, rewards=got.rewards, num_errors=got.num_errors)
            for prompt, group, got in zip(self.chunk.prompts, self.groups, rewards)
        ]


class Generation:
    """The rollout half of a controller's step."""

    def __init__(self, controller: int, config: Config, team: Team, client: Client) -> None:
        self._controller = controller
        self._config = config
        self._team = team
        self._client = client
        self._next_reward_worker = controller

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, phase: str) -> list[ScoredGroup]:
        """[prompt] scored groups, in the run's order.

        Raises:
            WorkerError: an engine or a reward worker failed or was late.
        """
        generating = {
            self._generate(chunk, sampling, num_samples=num_samples, phase=phase): chunk
            for chunk in self._chunks(prompts, num_samples, sampling)
        }
        scoring: dict[ray.ObjectRef, _Scoring] = {}
        scored: list[ScoredGroup] = []
        last_progress = time.monotonic()
        while generating or scoring:
            done, _ = ray.wait([*generating, *scoring], num_returns=1, timeout=POLL_S)
            if not done:
                last_progress = self._check_progress(generating, scoring, last_progress, phase)
                continue
            last_progress = time.monotonic()
            self._team.rendezvous.seen.remote(self._controller)
            if done[0] in generating:
                chunk = generating.pop(done[0])
                groups = fetch(done[0], name=self._team.engine_name(chunk.engine), what=phase)
                self._team.router.finish.remote(chunk.engine, chunk.size)
                call, work = self._score(chunk, groups, num_attempts=1)
                scoring[call] = work
            else:
                work = scoring.pop(done[0])
                rewards = self._rewards(done[0], work, phase)
                if rewards is None:
                    call, work = self._score(work.chunk, work.groups, num_attempts=work.num_attempts + 1)
                    scoring[call] = work
                else:
                    scored += work.scored(rewards)
        return sorted(scored, key=lambda group: group.prompt.slot.position)

    def _chunks(self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> list[_Chunk]:
        num_engines = len(self._team.engines)
        sizes = [
            sum(ref.shape[0] for ref in prompt.media) + num_samples * float(sampling.max_tokens) for prompt in prompts
        ]
        if self._config.rollout.deterministic:
            engines = [prompt.slot.position % num_engines for prompt in prompts]
            chunk_size = max(1, len(prompts))
        else:
            assigned = self._team.router.assign.remote(sizes)
            deadline_s = self._config.controllers.deadline_s
            engines = wait_all([("the router", assigned)], what="assign", deadline_s=deadline_s)[0]
            chunk_size = CHUNK_SIZE
        chunks = []
        for engine in range(num_engines):
            mine = [i for i in range(len(prompts)) if engines[i] == engine]
            starts = range(0, len(mine), chunk_size)
            if self._config.rollout.deterministic:
                starts = range(1)  # every engine hears from every controller, be it that there is nothing to do
            for start in starts:
                part = mine[start : start + chunk_size]
                chunks.append(
                    _Chunk(
                        engine=engine,
                        prompts=tuple(prompts[i] for i in part),
                        size=sum(sizes[i] for i in part),
                    )
                )
        return chunks

    def _generate(self, chunk: _Chunk, sampling: Sampling, *, num_samples: int, phase: str) -> ray.ObjectRef:
        tasks = [
            PromptTask(
                slot=prompt.slot.position,
                question=prompt.question,
                media=prompt.media,
                num_samples=num_samples,
                seed=prompt_seed(self._config.run.seed, prompt),
                name=f"rollout/{self._team.run_id}/{phase}/{prompt.slot.position}",
            )
            for prompt in chunk.prompts
        ]
        engine = self._team.engines[chunk.engine]
        if self._config.rollout.deterministic:
            return engine.generate_together.remote(phase, self._controller, tasks, sampling)
        return engine.generate.remote(tasks, sampling)

    def _score(self, chunk: _Chunk, groups: Sequence[GroupRef], *, num_attempts: int) -> tuple[Any, _Scoring]:
        worker = self._next_reward_worker % len(self._team.reward_workers)
        self._next_reward_worker += 1
        work = _Scoring(chunk=chunk, groups=tuple(groups), worker=worker, num_attempts=num_attempts)
        return self._team.reward_workers[worker].score.remote(work.tasks()), work

    def _rewards(self, call: ray.ObjectRef, work: _Scoring, phase: str) -> list[GroupRewards] | None:
        """The rewards of a finished call; None when its worker died (Ray restarts it) and may be asked once more."""
        try:
            return fetch(call, name=f"reward worker {work.worker}", what=f"the rewards of {phase}")
        except WorkerError as error:
            has_died = isinstance(error.__cause__, ray.exceptions.RayActorError)
            if not has_died or work.num_attempts == MAX_ATTEMPTS:
                raise
            return None

    def _check_progress(
        self,
        generating: Mapping[Any, _Chunk],
        scoring: Mapping[Any, _Scoring],
        last_progress: float,
        phase: str,
    ) -> float:
        """The time from which the next deadline counts; restarts reward workers that hang.

        Raises:
            WorkerError: engines have finished nothing for `controllers.deadline_s`.
        """
        deadline_s = self._config.controllers.deadline_s
        if time.monotonic() - last_progress < deadline_s:
            return last_progress
        if not scoring:
            engines = sorted({self._team.engine_name(chunk.engine) for chunk in generating.values()})
            raise WorkerError(
                f"{', '.join(engines)} finished nothing of {phase} for {deadline_s:g} s (controllers.deadline_s)"
            )
        for worker in {work.worker for work in scoring.values()}:
            ray.kill(self._team.reward_workers[worker], no_restart=False)  # its calls fail, and are asked again
        return time.monotonic()


def prompt_seed(run_seed: int, prompt: Prompt, *, purpose: str = "") -> int:
    """31 bits that depend on the run's seed, the prompt's place in it and what they are for."""
    text = f"{run_seed} {prompt.slot.epoch} {prompt.slot.index} {purpose}".strip()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
