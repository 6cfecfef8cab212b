"""Tests of a stream: further prompts come in as groups land, and the full batch cuts off what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from tests.yatt_mm.generation.fakes import JUDGE, SAMPLING, World, prompt, until, world
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.streaming import Streaming
from yatt_mm.protocol.control import Prompt, Slot
from yatt_mm.protocol.step_meter import StepMeter

FOUR = ("train.prompts_per_step=4", "train.num_minibatches=2", "sampling.replace_groups=true")


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(in_time())


def load(slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
    return [prompt(slot) for slot in slots], []


def stream(here: World, carried: dict[int, GroupWork] | None = None, **more: Any) -> Streaming:
    return Streaming(here.context, SAMPLING, load, {} if carried is None else carried, **more)


def test_a_stream_ends_with_a_full_batch() -> None:
    async def test() -> None:
        async with world(*FOUR) as here:
            one = stream(here)
            kept, outcome = await one.run(await here.open_stream())
        assert [work.prompt.slot.position for work in kept] == sorted(outcome.kept) == [0, 1, 2, 3]
        assert len(one.landed) == outcome.num_prompts_used == 4

    run(test())


def test_groups_without_signal_are_replaced_and_their_records_dropped() -> None:
    async def test() -> None:
        async with world(*FOUR) as here:
            here.reward_workers[0].plain = {1, 2}
            one = stream(here)
            kept, outcome = await one.run(await here.open_stream())
        assert outcome.num_rejected == 2
        assert len(kept) == 4
        assert not {1, 2} & {work.prompt.slot.position for work in kept}
        assert {"rollout/test/step 1/1", "rollout/test/step 1/2"} <= {ref.name for ref in one.dropped}
        assert {1, 2} <= {group.prompt.slot.position for group in one.landed}

    run(test())


def test_a_bad_prompt_is_replaced_and_noted() -> None:
    def load_but_one(slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        good = [slot for slot in slots if slot.position != 2]
        notices = [{"position": slot.position, "index": slot.index} for slot in slots if slot.position == 2]
        return [prompt(slot) for slot in good], notices

    async def test() -> None:
        async with world(*FOUR) as here:
            one = Streaming(here.context, SAMPLING, load_but_one, {})
            kept, _ = await one.run(await here.open_stream())
        assert [work.prompt.slot.position for work in kept] == [0, 1, 3, 4]

    run(test())


@pytest.mark.parametrize("tail", ["drop", "restart", "continue"])
def test_a_full_batch_cuts_off_the_rest_and_keeps_it_by_the_rule_of_the_tail(tail: str) -> None:
    async def test() -> None:
        overrides = (*FOUR, "sampling.over_dispatch=2", f"sampling.tail={tail}", "sampling.max_prompts_factor=4")
        async with world(*overrides) as here:
            for engine in here.engines:
                engine.held = {0, 1}
            carried: dict[int, GroupWork] = {}
            one = stream(here, carried)
            kept, outcome = await one.run(await here.open_stream())
            await until(lambda: here.coordinator._pools["rollout"].num_running == 0)
        assert not {0, 1} & {work.prompt.slot.position for work in kept}
        aborted = sorted(name for engine in here.engines for name in engine.aborted)
        assert aborted == ["rollout/test/step 1/0", "rollout/test/step 1/1"]
        if tail == "drop":
            assert carried == {}
        else:
            assert sorted(carried) == sorted(outcome.carried)
            assert {0, 1} <= set(carried)
        if tail == "continue":
            assert carried[0].group is not None, "the next stream continues its tokens"
            assert not set(aborted) & {ref.name for ref in one.dropped}
        else:
            assert set(aborted) <= {ref.name for ref in one.dropped}
            assert all(work.group is None for work in carried.values())

    run(test())


def test_a_carried_group_continues_with_its_tokens() -> None:
    async def test() -> None:
        overrides = (*FOUR, "sampling.over_dispatch=2", "sampling.tail=continue", "sampling.max_prompts_factor=4")
        carried: dict[int, GroupWork] = {}
        async with world(*overrides) as here:
            for engine in here.engines:
                engine.held = {0}
            await stream(here, carried).run(await here.open_stream())
        assert carried[0].num_parts == 1
        async with world(*overrides) as here:
            slots = [Slot(position=0, epoch=0, index=0)]
            await here.open_stream()
            one = stream(here, carried)
            one._begin(slots)
            await until(lambda: bool(one.landed))
            assert carried.get(0) is None
            assert (0, True) in [part for engine in here.engines for part in engine.parts]
            assert one.landed[0].group.ref.name == "rollout/test/step 1/0.1"

    run(test())


def test_a_stream_that_is_cancelled_keeps_finished_groups_and_the_tokens_of_the_others() -> None:
    async def test() -> None:
        async with world(*FOUR) as here:
            for engine in here.engines:
                engine.held = {0, 1}
            one = stream(here)
            running = asyncio.ensure_future(one.run(await here.open_stream()))
            await until(lambda: len(one.landed) == 2 and sum(len(engine._cut) for engine in here.engines) == 2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert running.cancelled()
        works = {work.prompt.slot.position: work for work in one.works}
        assert sorted(works) == [0, 1, 2, 3]
        assert [works[at].is_answered for at in range(4)] == [False, False, True, True]
        assert all(work.group is not None for work in works.values())
        assert works[2].rewards == [1.0, 0.0] and works[0].rewards == []

    run(test())


def test_what_a_group_has_passed_is_not_done_again() -> None:
    async def test() -> None:
        meter = StepMeter()
        async with world(*FOUR, *JUDGE, "placement.mode=partial_colocation", "sampling.replace_groups=false") as here:
            before = stream(here, judging_for=meter)
            await before.run(await here.open_stream())
            works = {work.prompt.slot.position: work for work in before.works}
            works[1].rewards, works[1].scores = [1.0, 0.0], works[1].scores[:1]  # not judged yet
            works[2].rewards, works[2].scores = [], []
            num_judged = meter.sums["genrm/num_judged"]
        async with world(*FOUR, *JUDGE, "placement.mode=partial_colocation", "sampling.replace_groups=false") as here:
            slots = await here.open_stream()
            kept, _ = await stream(here, works, judging_for=meter).run(slots)
            assert [part for engine in here.engines for part in engine.parts] == [], "nothing is answered twice"
            assert here.reward_workers[0].calls == [[2]]
            assert sorted(at for call in here.judges[0].calls for at in call) == [1, 2]
        assert meter.sums["genrm/num_judged"] == num_judged + 4
        assert all(work.rewards == [1.0, 1.0] for work in kept)

    run(test())


def test_judges_score_inside_the_stream() -> None:
    async def test() -> None:
        meter = StepMeter()
        async with world(*FOUR, *JUDGE, "placement.mode=partial_colocation") as here:
            here.judges[0].num_refused = 1
            kept, _ = await stream(here, judging_for=meter).run(await here.open_stream())
        assert all(work.rewards == [1.0, 1.0] or work.rewards == [0.5 + 0.5, 1.0] for work in kept)
        assert meter.sums["genrm/num_judged"] >= 8

    run(test())
