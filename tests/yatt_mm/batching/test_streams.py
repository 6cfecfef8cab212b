"""Tests of the meetings of controllers in a stream: the groups that they finish, and one that is late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.yatt_mm.batching.test_rendezvous import key, make, positions
from tests.yatt_mm.generation.fakes import group, prompt
from yatt_mm.batching import rendezvous
from yatt_mm.batching.dynamic_sampling import SamplingRule, Tail
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import PhaseAbortedError
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.protocol.control import Slot
from yatt_mm.protocol.rollout import PromptTask
from yatt_mm.protocol.saved_groups import SavedGroup


def finished(slot: Slot) -> SavedGroup:
    """Return what is kept of a finished group."""
    task = PromptTask(slot=slot.position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"{slot}")
    work = GroupWork(prompt=prompt(slot), group=group(task, "stop"), rewards=[0.0, 1.0])
    return work.saved()


def test_groups_that_were_finished_before_a_fault_are_kept_and_all_prompts_go_on_where_they_were() -> None:
    async def run() -> None:
        meeting = make(rule=SamplingRule(num_groups=6, max_prompts=8))
        first = await asyncio.gather(*(meeting.open_stream(key(), c) for c in (0, 1)))
        assert [*map(positions, first)] == [[0, 2, 4], [1, 3, 5]]
        (further,) = await meeting.land(1, [(5, None)])
        await meeting.land(0, [(0, True), (4, True)], [finished(first[0][0]), finished(first[0][2])])
        await meeting.land(1, [(3, True)], [finished(first[1][1])])
        await meeting.restart(1, 0)
        await asyncio.gather(*(meeting.gather(key(restart_count=1), c, None) for c in (0, 1)))
        kept = [await meeting.landed_groups(c) for c in (0, 1)]
        assert [[group.slot.position for group in of_one] for of_one in kept] == [[0, 4], [3]]
        again = [meeting.open_stream(key(sequence=1, restart_count=1), c) for c in (0, 1)]
        wanted = [first[0], [*first[1][:2], further]]
        assert await asyncio.gather(*again) == wanted, "no prompt is left out or comes twice"
        await asyncio.gather(*(meeting.gather(key(step=2, restart_count=1, sequence=2), c, None) for c in (0, 1)))
        assert await meeting.landed_groups(0) == [], "a step begins"

    asyncio.run(run())


@pytest.mark.parametrize(("tail", "kept"), [(Tail.DROP, [1, 2]), (Tail.RESTART, [1, 2]), (Tail.CONTINUE, [1, 2, 3])])
def test_groups_that_a_full_batch_drops_are_not_kept(tail: Tail, kept: list[int]) -> None:
    async def run() -> None:
        rule = SamplingRule(num_groups=2, max_prompts=8, replaces_groups=True, over_dispatch=2, tail=tail)
        meeting = make(rule=rule)
        slots = {
            slot.position: slot
            for share in await asyncio.gather(*(meeting.open_stream(key(), c) for c in (0, 1)))
            for slot in share
        }
        await meeting.land(0, [(0, False), (2, True)], [finished(slots[0]), finished(slots[2])])
        await meeting.land(1, [(1, True), (3, True)], [finished(slots[1]), finished(slots[3])])
        further = finished(replace(slots[3], position=4))
        assert await meeting.land(0, [(4, True)], [further]) == [], "it comes too late"
        found = [group.slot.position for c in (0, 1) for group in await meeting.landed_groups(c)]
        assert sorted(found) == kept, "records of the others are released"

    asyncio.run(run())


def test_a_controller_without_a_sign_of_life_ends_the_stream_and_one_with_signs_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        meeting = make()
        await asyncio.gather(*(meeting.open_stream(key(), c) for c in (0, 1)))
        for _ in range(4):
            now_s += 3.0
            await meeting.seen(1)
            now_s += 3.0
            assert await meeting.wait_full(0, 0.01) is None
        assert (await meeting.progress()).late == ()
        now_s += 2.5
        why = "controller 1 failed: it gave no sign of life for 5 s"
        for controller in (0, 1):
            with pytest.raises(PhaseAbortedError, match=why):
                await meeting.wait_full(controller, 0.01)
        assert (await meeting.progress()).late == (1,)

    asyncio.run(run())
