"""Tests of the reward workers of a generation phase: which of them score a group, and what happens to lost ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from tests.yatt_mm.generation.fakes import world
from tests.yatt_mm.generation.test_stages import answered, run
from yatt_mm.common.errors import WorkerError
from yatt_mm.generation import phase_calls, reward_stage
from yatt_mm.generation.phase_context import CHUNK_SIZE


def died() -> ray.exceptions.RayActorError:
    return ray.exceptions.RayActorError()


def test_a_reward_worker_that_dies_has_its_groups_scored_by_the_next_one() -> None:
    async def test() -> None:
        async with world(num_workers=2) as here:
            here.reward_workers[0].deaths = [died()]
            works = await answered(here, 4)
        assert all(work.rewards == [1.0, 0.0] for work in works)
        assert here.reward_workers[1].calls[0] == here.reward_workers[0].calls[0]

    run(test())


@pytest.mark.parametrize("num_workers", [1, 4])
def test_groups_are_scored_on_their_controllers_host_if_it_has_a_worker(num_workers: int) -> None:
    async def test() -> None:
        async with world("placement.devices_per_host=1", num_workers=num_workers) as here:
            await answered(here, 3 * CHUNK_SIZE)
        assert [bool(worker.calls) for worker in here.reward_workers] == [True, False, True, False][:num_workers]

    run(test())


def test_groups_wait_until_a_reward_worker_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_stage, "RETRY_S", 0.01)

    async def test() -> None:
        async with world() as here:
            here.reward_workers[0].deaths = [died()]
            here.reward_workers[0].absences = [ray.exceptions.ActorUnavailableError("restarting", None)] * 5
            works = await answered(here, 2)
        assert all(work.rewards == [1.0, 0.0] for work in works)
        assert len(here.reward_workers[0].calls) == 2 and not here.reward_workers[0].absences

    run(test())


def test_a_worker_that_is_busy_gets_the_groups_of_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_stage, "BUSY_S", 0.01)

    async def test() -> None:
        async with world(num_workers=2) as here:
            here.reward_workers[0].deaths = [died()]
            here.reward_workers[1].is_busy = True
            works = await answered(here, 1)
        assert works[0].rewards == [1.0, 0.0] and len(here.reward_workers[1].calls) == 1

    run(test())


def test_reward_workers_that_do_not_come_back_end_the_phase_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_stage, "RETRY_S", 0.01)

    async def test() -> None:
        with pytest.raises(WorkerError, match="reward worker 0 was lost during starting again"):
            async with world("controllers.deadline_s=0.5") as here:
                here.reward_workers[0].deaths = [died()]
                here.reward_workers[0].absences = [ray.exceptions.ActorUnavailableError("restarting", None)] * 500
                await answered(here, 1)

    run(test())


def test_a_call_that_something_else_cancels_ends_the_phase_with_an_error() -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match="a call was cancelled, though not by its phase"):
            async with world() as here:
                here.reward_workers[0].deaths = [asyncio.CancelledError()]  # type: ignore[list-item]
                await answered(here, 1)

    run(test())


def test_a_call_is_given_up_when_reward_workers_die_again_and_again() -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match="reward worker 0 was lost during the rewards of step 1"):
            async with world() as here:
                here.reward_workers[0].deaths = [died() for _ in range(4)]
                await answered(here, 1)
        assert len(here.reward_workers[0].deaths) == 1, "three attempts"

    run(test())


def test_a_reward_function_that_raises_is_not_asked_again() -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match="KeyError: 'answer'"):
            async with world() as here:
                here.reward_workers[0].deaths = [ray.exceptions.RayTaskError("score", "", KeyError("answer"))]
                await answered(here, 1)
        assert len(here.reward_workers[0].calls) == 1

    run(test())


def test_a_reward_worker_that_hangs_is_started_again_and_its_groups_are_scored_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phase_calls, "POLL_S", 0.05)
    killed: list[tuple[Any, bool]] = []

    async def test() -> None:
        async with world(num_workers=2, deadline_s=1.0) as here:
            hangs = here.reward_workers[0].hangs = asyncio.get_running_loop().create_future()

            def kill(worker: Any, *, no_restart: bool) -> None:
                killed.append((worker, no_restart))
                hangs.set_exception(died())

            monkeypatch.setattr(ray, "kill", kill)
            works = await answered(here, 1)
        assert works[0].rewards == [1.0, 0.0]
        assert [worker.calls for worker in here.reward_workers] == [[[0]], [[0]]]
        assert killed == [(here.context.team.reward_workers[0], False)], "Ray starts it again"

    run(test())
