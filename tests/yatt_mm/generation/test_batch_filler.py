"""Tests of what a step without a single group does, and what one leaves that is given up."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.yatt_mm.generation.fakes import DEADLINE_S, JUDGE, Records, config_of, group, prompt, world
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import DataError, StopRequested
from yatt_mm.generation import batch_filler
from yatt_mm.generation.batch_filler import BatchFiller, FilledBatch
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.placement.coordinator import PhaseEntry
from yatt_mm.protocol.control import Slot
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.rollout import PromptTask
from yatt_mm.protocol.step_meter import StepMeter


def filler_with(**parts: Any) -> Any:
    """Return a filler that has these parts alone."""
    names = inspect.signature(BatchFiller).parameters
    return BatchFiller(**{**dict.fromkeys(names, SimpleNamespace(restart_count=0)), "controller": 0, **parts})


@pytest.mark.parametrize(
    ("deterministic", "judges_in_turn", "way"),
    [(True, False, "_in_rounds"), (False, True, "_in_rounds"), (False, False, "_in_a_stream")],
)
def test_a_step_without_a_group_is_an_error_that_says_why(
    deterministic: bool, judges_in_turn: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = RoundOutcome(is_full=True, num_prompts_used=16)
    empty = FilledBatch(kept=[], judged=[], outcome=outcome, num_rounds=1, dropped=[])
    monkeypatch.setattr(BatchFiller, way, lambda *_: empty)
    config = SimpleNamespace(rollout=SimpleNamespace(deterministic=deterministic), judges_in_turn=judges_in_turn)
    rendezvous = SimpleNamespace(step=3, why_left_out=lambda: ". 16 samples were left out")
    filler = filler_with(config=config, rendezvous=rendezvous)
    wanted = "step 3 drew 16 prompts, and none of them can be used. 16 samples were left out"
    with pytest.raises(DataError, match=wanted):
        filler.fill()


def test_what_a_stream_of_responses_drops_before_the_judges_turn_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records()
    useless: Any = SimpleNamespace(name="group/3")
    filler = filler_with(client=records)
    stream = SimpleNamespace(dropped=[useless])
    monkeypatch.setattr(BatchFiller, "_stream", lambda *_: (stream, ["a group"], None))
    monkeypatch.setattr(BatchFiller, "_judge_all", lambda *_: None)
    assert filler._in_turn("step 1") == ["a group"]
    assert records.released == ["group/3"]


def test_judges_in_turn_see_the_groups_that_are_answered_and_none_that_is_carried_over() -> None:
    late = ("sampling.over_dispatch=2", "sampling.tail=continue", "sampling.max_prompts_factor=4")

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def result(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(DEADLINE_S)

        @contextmanager
        def enter(phase: Phase, **_: Any) -> Iterator[Any]:
            yield result(here.coordinator.enter(phase, 1, True)) if phase is Phase.JUDGE else here.context

        def run(entered: Any, _name: str, do: Any) -> Any:
            return result(do(replace(here.context, number=entered.number, awake=entered.awake)))

        async with world(*JUDGE, *late, "train.prompts_per_step=4", "train.num_minibatches=2") as here:
            for engine in here.engines:
                engine.held = {0, 1}
            rendezvous = SimpleNamespace(open_stream=lambda: result(here.open_stream()))
            parts = {"config": here.config, "client": here.records, "meter": StepMeter(), "rendezvous": rendezvous}
            filler = filler_with(**parts, enter_phase=enter)
            filler.run, filler._load = run, lambda slots: ([prompt(slot) for slot in slots], [])
            works = await asyncio.to_thread(filler._in_turn, "step 1")
            judged = sorted(itertools.chain.from_iterable(here.judges[0].calls))
        assert judged == sorted(one.prompt.slot.position for one in works) and len(judged) >= 4
        assert {0, 1} <= set(filler._carried) and not set(judged) & set(filler._carried)
        assert all(len(one.scores) == 2 for one in works), "those of the rule and of the judge"

    asyncio.run(asyncio.wait_for(test(), 60))


def work(position: int) -> GroupWork:
    """Return a group on its way, with a record."""
    slot = Slot(position=position, epoch=0, index=position)
    task = PromptTask(slot=position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"group/{position}")
    return GroupWork(prompt=prompt(slot), group=group(task, "abort"))


class Stops:
    """A rendezvous that tells the run to stop once a stream is open."""

    def __init__(self) -> None:
        self.step, self.may_stop, self.told = 1, True, asyncio.Event()

    def open_stream(self) -> list[Slot]:
        return [work(position).prompt.slot for position in (4, 5)]

    async def stop_asked(self) -> None:
        await self.told.wait()

    def seen(self) -> None:
        """Do nothing."""


def test_a_stop_in_a_stream_leaves_its_groups_and_those_of_the_rounds_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        """A stream that never ends by itself."""

        def __init__(self, _context: Any, _sampling: Any, _load: Any, carried: dict[int, GroupWork], **_: Any) -> None:
            self.works = [carried.pop(4), work(5), GroupWork(prompt=work(6).prompt)]

        async def run(self, slots: list[Slot]) -> None:
            rendezvous.told.set()
            await asyncio.Event().wait()

    @contextmanager
    def enter(*_: Any, **__: Any) -> Iterator[PhaseEntry]:
        yield PhaseEntry(number=1, awake={}, moved=())

    monkeypatch.setattr(batch_filler, "Streaming", Stream)
    rendezvous = Stops()
    filler = filler_with(config=config_of(), rendezvous=rendezvous, enter_phase=enter)
    filler.go_on_with([work(4), work(2)])
    filler._of_step = {3: work(3)}
    with pytest.raises(StopRequested):
        filler.fill()
    assert [found.prompt.slot.position for found in filler.begun()] == [2, 3, 4, 5], "the last one has no token yet"
    filler.forget_begun()
    assert [found.prompt.slot.position for found in filler.begun()] == [2], "what is carried over stays"
