"""Tests of a group's way through the stages: engines, reward workers and judges, and what happens when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import ray

from tests.yatt_mm.generation.fakes import JUDGE, SAMPLING, World, until, world
from yatt_mm.common.errors import WorkerError
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.rollout_stage import RolloutStage
from yatt_mm.generation.rounds import answer, judge
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.rollout.engine_types import EngineError


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(in_time())


async def answered(here: World, num: int) -> list[GroupWork]:
    return await answer(here.prompts(num), SAMPLING, here.context, num_samples=2)


def test_a_round_samples_and_scores_every_group_in_the_order_of_its_prompts() -> None:
    async def test() -> None:
        async with world() as here:
            works = await answered(here, 20)
        assert [work.prompt.slot.position for work in works] == list(range(20))
        assert all(work.is_answered and work.rewards == [1.0, 0.0] for work in works)
        assert sorted(at for engine in here.engines for call in engine.calls for at in call) == list(range(20))
        assert here.records.released == []

    run(test())


def test_what_comes_up_at_the_same_time_goes_out_as_one_call() -> None:
    async def test() -> None:
        async with world("rollout.num_engines=1") as here:
            await answered(here, 20)
        assert [len(call) for call in here.engines[0].calls] == [8, 8, 4]
        assert sum(len(call) for worker in here.reward_workers for call in worker.calls) == 20
        assert max(len(call) for worker in here.reward_workers for call in worker.calls) == 8

    run(test())


def test_no_engine_has_more_groups_than_it_takes() -> None:
    async def test() -> None:
        async with world("rollout.max_groups_per_engine=3") as here:
            for engine in here.engines:
                engine.held = set(range(20))
            under_way = asyncio.ensure_future(answered(here, 20))
            await until(lambda: sum(len(call) for engine in here.engines for call in engine.calls) == 6)
            await asyncio.sleep(0.05)
            assert [len(engine.parts) for engine in here.engines] == [3, 3]
            for engine in here.engines:
                await engine.abort(list(engine._cut))
                engine.held.clear()
            works = await under_way
        assert all(work.is_answered for work in works)

    run(test())


def test_a_deterministic_phase_makes_one_call_to_every_engine_and_the_order_alone_decides_which() -> None:
    async def test(num: int) -> None:
        async with world("rollout.deterministic=true") as here:
            await answered(here, num)
        for number, engine in enumerate(here.engines):
            assert engine.calls == [list(range(number, num, 2))]

    run(test(20))
    run(test(1))
    run(test(0))  # an engine waits for the calls of all controllers, so one without groups calls as well


def test_a_group_whose_engine_sleeps_continues_on_another_one() -> None:
    async def test() -> None:
        async with world() as here:
            here.engines[0].held = here.engines[1].held = {0}
            under_way = asyncio.ensure_future(answered(here, 2))
            await until(lambda: any(call == [0] for engine in here.engines for call in engine.calls))
            number = 0 if [0] in here.engines[0].calls else 1
            here.engines[1 - number].held.clear()
            here.coordinator._pools["rollout"].sleep(number, now_s=here.coordinator._now_s)
            await here.engines[number].set_state(State.ASLEEP)
            works = await under_way
        assert all(work.is_answered for work in works)
        assert (0, True) in here.engines[1 - number].parts, "another engine continues its tokens"
        assert here.records.released == ["rollout/test/step 1/0"], "the record of the first attempt"
        assert works[0].group is not None
        assert works[0].group.ref.name == "rollout/test/step 1/0.1"

    run(test())


def test_a_group_that_is_cut_off_keeps_the_tokens_that_it_has() -> None:
    async def test() -> None:
        async with world() as here:
            here.engines[0].held = here.engines[1].held = {0}
            (prompt,) = here.prompts(1)
            work, stage = GroupWork(prompt=prompt), RolloutStage(here.context, SAMPLING, num_samples=2)
            way = here.context.calls.start(stage.sample(work))
            await until(lambda: any(engine.parts for engine in here.engines))
            way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await way
            assert work.group is not None
            assert work.group.finish_reasons == ("abort", "abort")
            assert [name for engine in here.engines for name in engine.aborted] == ["rollout/test/step 1/0"]
            await until(lambda: here.coordinator._pools["rollout"].num_running == 0)

    run(test())


@pytest.mark.parametrize("num_ticks", range(12))
def test_an_engine_that_is_granted_about_when_its_group_is_cut_off_is_given_back(num_ticks: int) -> None:
    async def test() -> None:
        async with world("rollout.max_groups_per_engine=1", "rollout.num_engines=1") as here:
            here.engines[0].held = {0}
            works = [GroupWork(prompt=prompt) for prompt in here.prompts(3)]
            stage = RolloutStage(here.context, SAMPLING, num_samples=2)
            first, second, third = (here.context.calls.start(stage.sample(work)) for work in works)
            await until(lambda: here.engines[0].calls == [[0]])
            await here.engines[0].abort(list(here.engines[0]._cut))  # it comes back, and waits for another turn
            here.engines[0].held.clear()
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(first, third)
            await asyncio.wait([second])
            await until(lambda: here.coordinator._pools["rollout"].num_running == 0)
            await until(lambda: here.coordinator._pools["rollout"].num_waiting == 0)
            assert works[0].is_answered
            assert works[2].is_answered

    run(test())


@pytest.mark.parametrize("mode", ["true", "false"])
def test_an_engine_that_fails_is_named_and_ends_the_phase(mode: str) -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match=r"engine 1 failed at step 1: ValueError: out of memory"):
            async with world(f"rollout.deterministic={mode}") as here:
                here.engines[0].held = set(range(20))
                cause = ValueError("out of memory")
                here.engines[1].failure = ray.exceptions.RayTaskError("generate", "", cause)
                await answered(here, 20)

    run(test())


def test_a_phase_in_which_nothing_ends_names_what_it_waits_for() -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match=r"nothing ended for 0.5 s .*waited for engine 0 \(step 1\)"):
            async with world("rollout.num_engines=1", deadline_s=0.5) as here:
                here.engines[0].held = {0}
                await answered(here, 1)

    run(test())


def test_judges_add_their_weighted_scores_to_the_weighted_rewards() -> None:
    async def test() -> None:
        meter = StepMeter()
        async with world(*JUDGE, "placement.mode=partial_colocation") as here:
            works = await answered(here, 3)
            await judge(works, meter, here.context)
        assert all(work.rewards == [0.5 * 1.0 + 2 * 0.25, 0.5 * 0.0 + 2 * 0.5] for work in works)
        assert meter.sums["genrm/num_judged"] == 6
        assert meter.sums["reward/function_mean"] == 3.0

    run(test())


def test_a_group_without_a_verdict_is_judged_again() -> None:
    async def test() -> None:
        meter = StepMeter()
        async with world(*JUDGE, "placement.mode=partial_colocation") as here:
            works = await answered(here, 3)
            here.judges[0].num_refused = 2
            await judge(works, meter, here.context)
            await until(lambda: here.coordinator._pools["head"].num_running == 0)
        assert sum(len(call) for call in here.judges[0].calls) == 5
        assert meter.sums["genrm/num_judged"] == 6, "a group counts once"
        assert here.coordinator._pools["head"].num_ended == 3

    run(test())


@pytest.mark.parametrize("num", [0, 1, 20])
def test_a_deterministic_phase_calls_every_engine_of_a_judge_once(num: int) -> None:
    async def test() -> None:
        async with world(*JUDGE, "placement.mode=partial_colocation", "rollout.deterministic=true") as here:
            works = await answered(here, num)
            await judge(works, StepMeter(), here.context)
            assert here.judges[0].calls == [list(range(num))]

    run(test())


@pytest.mark.parametrize(
    "death",
    [
        ray.exceptions.RayActorError(),
        ray.exceptions.RayTaskError("generate", "", EngineError("engine 1 gave up generating: its process died")),
    ],
)
def test_other_engines_take_over_the_groups_of_one_that_dies(death: Exception) -> None:
    async def test() -> None:
        async with world("rollout.max_groups_per_engine=4") as here:
            here.engines[1].failure = death
            works = [GroupWork(prompt=prompt) for prompt in here.prompts(12)]
            cut = await here.engines[0].generate(
                [RolloutStage(here.context, SAMPLING, num_samples=2)._task(works[0])], SAMPLING
            )
            works[0].group = replace(cut[0], finish_reasons=("stop", "abort"))
            here.engines[0].parts.clear()
            stage = RolloutStage(here.context, SAMPLING, num_samples=2)
            for work in works:
                here.context.calls.start(stage.sample(work))
            await here.context.calls.finish()
            assert all(work.is_answered for work in works)
            assert sorted(slot for slot, _ in here.engines[0].parts) == list(range(12)), "each once"
            assert (0, True) in here.engines[0].parts, "it goes on with the tokens that it had"
            assert here.engines[1].calls != [], "the other one was asked"
            assert here.coordinator._pools["rollout"].awake == {0}

    run(test())


def test_the_death_of_the_last_engine_ends_the_phase() -> None:
    async def test() -> None:
        with pytest.raises(WorkerError, match=r"engine [01] was lost during step 1"):
            async with world() as here:
                for engine in here.engines:
                    engine.failure = ray.exceptions.RayActorError()
                await answered(here, 8)
        assert all(engine.calls for engine in here.engines)

    run(test())
