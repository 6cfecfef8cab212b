"""Generate and score a controller's prompts: engines answer, reward workers judge each chunk as it finishes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    engine: int
    prompts: tuple[Prompt, ...]
    size: float


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
        chunks = self._chunks(prompts, num_samples, sampling)
        generating = {self._generate(chunk, sampling, num_samples=num_samples, phase=phase): chunk for chunk in chunks}
        scoring: dict[ray.ObjectRef, tuple[_Chunk, list[GroupRef], int]] = {}
        scored: list[ScoredGroup] = []
        while generating or scoring:
            done, _ = ray.wait([*generating, *scoring], num_returns=1, timeout=self._config.controllers.deadline_s)
            if not done:
                raise WorkerError(self._late(generating, scoring, phase))
            if done[0] in generating:
                chunk = generating.pop(done[0])
                groups = fetch(done[0], name=self._team.engine_name(chunk.engine), what=phase)
                self._team.router.finish.remote(chunk.engine, chunk.size)
                worker = self._pick_reward_worker()
                call = self._team.reward_workers[worker].score.remote(self._reward_tasks(chunk, groups))
                scoring[call] = (chunk, groups, worker)
            else:
                chunk, groups, worker = scoring.pop(done[0])
                rewards = self._rewards(done[0], chunk, groups, worker, phase)
                scored += [
                    ScoredGroup(prompt=prompt, group=group, rewards=got.rewards, num_errors=got.num_errors)
                    for prompt, group, got in zip(chunk.prompts, groups, rewards)
                ]
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
                seed=_seed(self._config.run.seed, prompt),
                name=f"rollout/{self._config.run.name}/{self._team.generation}/{phase}/{prompt.slot.position}",
            )
            for prompt in chunk.prompts
        ]
        engine = self._team.engines[chunk.engine]
        if self._config.rollout.deterministic:
            return engine.generate_together.remote(phase, self._controller, tasks, sampling)
        return engine.generate.remote(tasks, sampling)

    def _reward_tasks(self, chunk: _Chunk, groups: Sequence[GroupRef]) -> list[RewardTask]:
        return [
            RewardTask(group=group, answer=prompt.answer, fields=prompt.fields)
            for prompt, group in zip(chunk.prompts, groups)
        ]

    def _pick_reward_worker(self) -> int:
        worker = self._next_reward_worker % len(self._team.reward_workers)
        self._next_reward_worker += 1
        return worker

    def _rewards(
        self, call: ray.ObjectRef, chunk: _Chunk, groups: list[GroupRef], worker: int, phase: str
    ) -> list[GroupRewards]:
        """The rewards of a finished call; a worker that died is asked once more (Ray restarts it)."""
        name = f"reward worker {worker}"
        try:
            return ray.get(call)
        except ray.exceptions.RayActorError:
            again = self._team.reward_workers[worker].score.remote(self._reward_tasks(chunk, groups))
            deadline_s = self._config.reward.deadline_s
            return wait_all([(name, again)], what=f"rewards of {phase}, again", deadline_s=deadline_s)[0]
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{name} failed at {phase}: {error.cause}") from error

    def _late(self, generating: dict[Any, _Chunk], scoring: dict[Any, Any], phase: str) -> str:
        engines = sorted({self._team.engine_name(chunk.engine) for chunk in generating.values()})
        workers = sorted({f"reward worker {worker}" for _, _, worker in scoring.values()})
        return (
            f"{', '.join(engines + workers)} did not finish {phase} in "
            f"{self._config.controllers.deadline_s:g} s (controllers.deadline_s)"
        )


def _seed(run_seed: int, prompt: Prompt) -> int:
    """31 bits that depend on the run's seed and the prompt's place in it."""
    text = f"{run_seed} {prompt.slot.epoch} {prompt.slot.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
