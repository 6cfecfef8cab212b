"""Tests that controllers meet, or get an error in time that says who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.yatt_mm.batching.orders import order_of
from yatt_mm.batching.dynamic_sampling import SamplingRule
from yatt_mm.batching.journal import StepShare
from yatt_mm.batching.meeting import MeetingKey, StepGivenUp
from yatt_mm.batching.packed import Packed
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.errors import DataError, PhaseAbortedError
from yatt_mm.protocol.control import Best, Slot
from yatt_mm.protocol.step_meter import StepMeter


def key(
    step: int = 1, phase: str = "train", sequence: int = 0, restart_count: int = 0, *, may_stop: bool = False
) -> MeetingKey:
    return MeetingKey(step=step, phase=phase, restart_count=restart_count, sequence=sequence, may_stop=may_stop)


RULE = SamplingRule(num_groups=6, max_prompts=6)


def make(num: int = 2, deadline_s: float = 5.0, rule: SamplingRule = RULE) -> Rendezvous:
    batches = StepBatches(rule, order_of(100, seed=0))
    return Rendezvous(num_controllers=num, deadline_s=deadline_s, batches=batches)


def positions(slots: Sequence[Slot]) -> list[int]:
    return [slot.position for slot in slots]


def test_a_gather_gives_every_controller_all_values_in_controller_order() -> None:
    async def run() -> list:
        meeting = make(3)
        return await asyncio.gather(*(meeting.gather(key(), c, c * 10) for c in (2, 0, 1)))

    assert asyncio.run(run()) == [[0, 10, 20]] * 3


def test_a_step_that_was_begun_goes_on_from_its_prompts_and_a_checkpoint_of_the_step_before_from_its_own() -> None:
    async def run() -> None:
        batches = StepBatches(SamplingRule(num_groups=6, max_prompts=8), order_of(100, seed=0))
        before = batches.state()
        batches.open(1)
        batches.land(0, 2, None)
        begun = batches.begun_state()
        batches = batches.back_at(before)
        meeting = Rendezvous(num_controllers=1, deadline_s=5.0, batches=batches, begun={2: begun})
        await meeting.gather(key(step=1), 0, None)
        assert [slot.position for slot in await meeting.peek(1)] == [0]
        await meeting.gather(key(step=2), 0, None)
        assert [slot.position for slot in await meeting.peek(1)] == [7], "its prompts are drawn already"
        assert await meeting.sampling_state(1) == before
        assert (await meeting.sampling_state(2))["order"] == begun["order"]
        assert positions(await meeting.open_stream(key(step=2, sequence=1), 0)) == [0, 1, 3, 4, 5, 6]
        await meeting.restart(1, 1)
        slots = await meeting.open_stream(key(step=2, restart_count=1), 0)
        assert positions(slots) == [0, 1, 3, 4, 5, 6], "also after a fault"

    asyncio.run(run())


def test_a_set_of_which_no_sample_can_be_used_is_told_with_the_commonest_reason() -> None:
    async def run() -> None:
        batches = StepBatches(SamplingRule(num_groups=2, max_prompts=20), order_of(3, seed=0))
        meeting = Rendezvous(num_controllers=1, deadline_s=5.0, batches=batches)
        assert await meeting.why_left_out() == ""
        slots = await meeting.open_stream(key(), 0)
        for number, reason in enumerate(("no such file", "torn", "no such file")):
            await meeting.put_record({"kind": "quarantine", "key": f"{number}", "reason": reason})
        await meeting.put_record({"kind": "step", "step": 0})
        with pytest.raises(
            DataError,
            match=r"all 3 training samples were left out; check data.train and data.filter. 3 samples were left out "
            r"\(quarantine.jsonl has all\), 2 of them because: no such file",
        ):
            while slots:
                slots = await meeting.land(0, [(slot.position, None) for slot in slots])
        assert len(await meeting.take_records(0.0)) == 4, "the records were kept for the launcher"

    asyncio.run(run())


def test_a_late_controller_is_named_and_the_phase_ends_for_all() -> None:
    async def run() -> None:
        meeting = make(3, deadline_s=0.2)
        waiting = asyncio.gather(meeting.gather(key(), 0, None), meeting.gather(key(), 2, None))
        with pytest.raises(PhaseAbortedError, match=r"controller\(s\) 1 did not reach step 1, phase train"):
            await waiting
        with pytest.raises(PhaseAbortedError, match="did not reach"):
            await meeting.gather(key(), 1, None)

    asyncio.run(run())


def test_a_controller_in_another_phase_ends_it_for_all() -> None:
    async def run() -> None:
        meeting = make(2)
        first = asyncio.ensure_future(meeting.gather(key(phase="train"), 0, None))
        await asyncio.sleep(0)
        with pytest.raises(PhaseAbortedError, match=r"controller 1 failed: it came to step 1, phase publish"):
            await meeting.gather(key(phase="publish"), 1, None)
        with pytest.raises(PhaseAbortedError, match="phase publish"):
            await first

    asyncio.run(run())


def test_an_abort_wakes_those_who_wait_with_its_reason() -> None:
    async def run() -> None:
        meeting = make(2)
        first = asyncio.ensure_future(meeting.gather(key(), 0, None))
        await asyncio.sleep(0)
        await meeting.abort(1, "out of memory")
        with pytest.raises(PhaseAbortedError, match="controller 1 failed: out of memory"):
            await first

    asyncio.run(run())


def test_a_leftover_of_an_earlier_start_is_turned_away() -> None:
    with pytest.raises(PhaseAbortedError, match="belongs to restart 7; this run is at 0"):
        asyncio.run(make(1).gather(key(restart_count=7), 0, None))


def test_prompts_are_dealt_in_turn_in_any_order_of_asking() -> None:
    async def run(order: tuple[int, ...]) -> list:
        meeting = make(2)
        shares = await asyncio.gather(*(meeting.draw(key(), c, []) for c in order))
        return [share for _, share in sorted(zip(order, shares), key=lambda pair: pair[0])]

    shares = asyncio.run(run((0, 1)))
    assert shares == asyncio.run(run((1, 0)))
    assert [[slot.position for slot in share] for share in shares] == [[0, 2, 4], [1, 3, 5]]


def test_records_reach_the_watcher_once() -> None:
    async def run() -> None:
        meeting = make(1)
        assert await meeting.take_records(0.01) == []
        waiting = asyncio.ensure_future(meeting.take_records(5.0))
        await asyncio.sleep(0)
        await meeting.put_record({"kind": "step"})
        assert await waiting == [{"kind": "step"}]
        assert await meeting.take_records(0.01) == []

    asyncio.run(run())


def test_a_busy_controller_that_shows_signs_of_life_is_waited_for() -> None:
    async def run() -> list:
        meeting = make(2, deadline_s=0.3)
        first = asyncio.ensure_future(meeting.gather(key(), 0, "early"))
        for _ in range(4):
            await asyncio.sleep(0.15)
            await meeting.seen(1)
        return await asyncio.gather(first, meeting.gather(key(), 1, "late"))

    assert asyncio.run(run()) == [["early", "late"]] * 2


def test_a_run_that_is_told_to_stop_gives_the_step_up_for_all_controllers_and_its_prompts_are_drawn_again() -> None:
    async def run() -> None:
        meeting = make(2)
        await asyncio.gather(*(meeting.gather(key(), c, None) for c in range(2)))
        before = await meeting.sampling_state(1)
        draws = [meeting.draw(key(2, sequence=1, may_stop=True), c, []) for c in range(2)]
        assert [len(share) for share in await asyncio.gather(*draws)] == [3, 3]
        stop = asyncio.ensure_future(meeting.wait_stop())
        first = asyncio.ensure_future(meeting.gather(key(2, sequence=2, may_stop=True), 0, None))
        await asyncio.sleep(0)
        assert not stop.done() and not first.done()
        await meeting.stop()
        await stop
        assert isinstance(await first, StepGivenUp), "who waits is told at once"
        late = await meeting.gather(key(2, sequence=2, may_stop=True), 1, None)
        assert isinstance(late, StepGivenUp), "who comes last as well, though all have come now"
        for method, more in ((meeting.draw, [[]]), (meeting.open_stream, [])):
            given = await method(key(2, sequence=3, may_stop=True), 0, *more)
            assert isinstance(given, StepGivenUp), "a meeting that deals prompts says so too"
        assert await meeting.sampling_state(2) != before
        assert await meeting.sampling_state(1) == before
        parts = await asyncio.gather(*(meeting.gather(key(1, sequence=10**9), c, c) for c in range(2)))
        assert parts == [[0, 1]] * 2, "what has to be finished still is"
        assert await meeting.sampling_state(1) == before

    asyncio.run(run())


def test_controllers_that_may_not_stop_any_more_meet_as_before() -> None:
    async def run() -> list:
        meeting = make(2)
        first = asyncio.ensure_future(meeting.gather(key(), 0, 0))
        await asyncio.sleep(0)
        await meeting.stop()
        return await asyncio.gather(first, meeting.gather(key(), 1, 1))

    assert asyncio.run(run()) == [[0, 1]] * 2


async def finish(meeting: Rendezvous, step: int) -> None:
    """Draw a step's prompts, and finish the step."""
    draws = [meeting.draw(key(step, sequence=2 * step), c, []) for c in range(2)]
    drawn = await asyncio.gather(*draws)
    landed = [[(slot.position, True) for slot in share] for share in drawn]
    await asyncio.gather(*(meeting.finish_round(key(step, sequence=2 * step + 1), c, landed[c]) for c in range(2)))
    await meeting.finish_step({"kind": "step", "step": step}, Best(step=step, value=0.5), 0.25)


def test_after_a_fault_other_controllers_draw_the_prompts_of_the_broken_step_again() -> None:
    async def run() -> None:
        meeting = make(2)
        await finish(meeting, 1)
        drawn = await asyncio.gather(*(meeting.draw(key(2, sequence=0), c, []) for c in range(2)))
        left = asyncio.ensure_future(meeting.gather(key(2, "rollout", sequence=1), 0, None))
        await asyncio.sleep(0)
        await meeting.abort(1, "it died")
        progress = await meeting.progress()
        assert (progress.step, progress.at_step, progress.phase) == (1, 2, "rollout")
        assert (progress.best, progress.kl_coef) == (Best(step=1, value=0.5), 0.25)
        await meeting.restart(1, step=1)
        with pytest.raises(PhaseAbortedError):
            await left
        with pytest.raises(PhaseAbortedError, match="belongs to restart 0; this run is at 1"):
            await meeting.gather(key(2), 0, None)
        again = await asyncio.gather(*(meeting.draw(key(2, restart_count=1), c, []) for c in range(2)))
        assert again == drawn

    asyncio.run(run())


def test_after_a_fault_a_step_that_was_generated_goes_on_and_the_next_one_has_other_prompts() -> None:
    async def run() -> None:
        meeting = make(2)
        await finish(meeting, 1)
        await asyncio.gather(*(meeting.draw(key(2, sequence=0), c, []) for c in range(2)))
        rounds = [[(position, True) for position in range(6 + c, 12, 2)] for c in range(2)]
        await asyncio.gather(*(meeting.finish_round(key(2, sequence=1), c, rounds[c]) for c in range(2)))
        shares = [StepShare(groups=(), has_wrong_rewards=False, meter=StepMeter()) for _ in range(2)]
        for c in range(2):
            assert await meeting.put_share(c, 2, Packed.of(shares[c]), 0) == 2
        await meeting.restart(1, step=1)
        kept = await meeting.share(1, 2)
        assert kept is not None and kept.open() == shares[1]
        drawn = await asyncio.gather(*(meeting.draw(key(3, restart_count=1), c, []) for c in range(2)))
        assert sorted(slot.position for share in drawn for slot in share) == list(range(12, 18))

    asyncio.run(run())


def test_a_notice_that_comes_again_with_the_step_is_told_once() -> None:
    async def run() -> None:
        meeting = make(1)
        notice = {"kind": "quarantine", "step": 1, "key": "a", "reason": "torn"}
        await meeting.gather(key(1), 0, None)
        for _ in range(2):
            await meeting.put_record(dict(notice))
        assert len(await meeting.take_records(0.0)) == 1
        assert "1 samples were left out" in await meeting.why_left_out()
        await meeting.gather(key(2, sequence=1), 0, None)
        assert not await meeting.put_record({**notice, "step": 2}), "the next evaluation finds it again"
        assert await meeting.put_record({**notice, "key": "b"})
        assert len(await meeting.take_records(0.0)) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "skipped", "step": 1, "why": "the loss is nan", "folder": "skipped/step_000001"},
        {"kind": "failure", "who": "reward.judges.a", "num_failed": 1, "what": "TimeoutError", "among": "step 1"},
    ],
)
def test_a_warning_of_a_step_that_is_repeated_is_told_once(record: dict[str, object]) -> None:
    async def run() -> None:
        meeting = make(1)
        assert await meeting.put_record(dict(record))
        assert not await meeting.put_record(dict(record))
        assert len(await meeting.take_records(0.0)) == 1
        assert await meeting.why_left_out() == "", "no sample was left out"

    asyncio.run(run())


def test_calls_of_controllers_that_are_gone_end_and_a_stop_holds_for_those_that_follow() -> None:
    async def run() -> None:
        meeting = make(1)
        left = asyncio.ensure_future(meeting.wait_stop())
        await asyncio.sleep(0)
        await meeting.restart(1, step=0)
        await asyncio.wait_for(left, 1.0)
        waiting = asyncio.ensure_future(meeting.wait_stop())
        await asyncio.sleep(0)
        assert not waiting.done()
        await meeting.stop()
        await asyncio.wait_for(waiting, 1.0)
        await meeting.restart(2, step=0)
        await asyncio.wait_for(meeting.wait_stop(), 1.0)

    asyncio.run(run())


def test_a_controller_that_is_late_is_known_to_the_launcher() -> None:
    async def run() -> None:
        meeting = make(2, deadline_s=0.1)
        with pytest.raises(PhaseAbortedError):
            await meeting.gather(key(), 0, None)
        assert (await meeting.progress()).late == (1,)
        await meeting.restart(1, step=0)
        assert (await meeting.progress()).late == ()

    asyncio.run(run())
