"""Tests of what is kept of the steps since the last checkpoint."""

from __future__ import annotations

from dataclasses import replace

from tests.yatt_mm.generation.fakes import group, prompt
from yatt_mm.batching.journal import Journal, StepShare
from yatt_mm.batching.packed import Packed
from yatt_mm.common.conversation import ask
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.rollout import PromptTask
from yatt_mm.protocol.step_meter import StepMeter

NBYTES = 100


def share(position: int) -> StepShare:
    """Return a share of one group, whose record has `NBYTES` bytes."""
    task = PromptTask(slot=position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"group/{position}")
    found = group(task, "stop")
    scored = ScoredGroup(
        prompt=prompt(Slot(position=position, epoch=0, index=position)),
        group=replace(found, ref=replace(found.ref, nbytes=NBYTES)),
        rewards=(0.0, 1.0),
    )
    return StepShare(groups=(scored,), has_wrong_rewards=False, meter=StepMeter())


def journal(max_bytes: int = 10**6) -> Journal:
    return Journal(num_controllers=2, max_bytes=max_bytes)


def put(kept: Journal, step: int, controller: int, one: StepShare) -> int:
    return kept.put(step, controller, Packed.of(one), one.nbytes)


def test_a_step_counts_when_every_controller_has_brought_its_share() -> None:
    kept = journal()
    mine, other = share(0), share(1)
    put(kept, 1, 0, mine)
    assert kept.share(1, 0) is None and not kept.covers(1, 1)
    put(kept, 1, 1, other)
    assert [found.open() for c in (0, 1) if (found := kept.share(1, c))] == [mine, other]
    assert kept.share(2, 0) is None
    assert kept.covers(1, 1) and not kept.covers(1, 2) and not kept.covers(0, 1)
    assert kept.covers(2, 1), "there is nothing between a checkpoint and the step right after it"


def test_what_a_fault_left_in_part_is_dropped_and_the_rest_stays() -> None:
    kept = journal()
    for step in (1, 2):
        put(kept, step, 0, share(2 * step))
    put(kept, 1, 1, share(3))
    kept.drop_incomplete()
    assert kept.covers(1, 1) and kept.refs(0).keys() == {1}


def test_steps_of_which_there_is_a_checkpoint_are_dropped() -> None:
    kept = journal()
    for step in (1, 2, 3):
        for controller in (0, 1):
            put(kept, step, controller, share(2 * step + controller))
    kept.drop_until(2)
    assert {step: [ref.name for ref in refs] for step, refs in kept.refs(1).items()} == {3: ["group/7"]}
    assert kept.covers(3, 3) and not kept.covers(2, 3)


def test_records_take_no_more_than_their_share_of_the_data_plane() -> None:
    kept = journal(max_bytes=5 * NBYTES)
    firsts = [put(kept, step, controller, share(0)) for step in (1, 2, 3) for controller in (0, 1)]
    assert firsts == [1, 1, 1, 1, 1, 3], "600 bytes are too many; the step that is being trained on stays"
    assert not kept.covers(2, 3) and kept.covers(3, 3)
    assert put(kept, 4, 0, share(0)) == 3
