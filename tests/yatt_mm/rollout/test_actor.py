"""Tests of the actor's own part, with a fake worker: controllers that wait for each other, and a stop in the middle of
a start."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dataplane.core.refs import Ref
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import PhaseAbortedError
from yatt_mm.protocol.rollout import EngineSpec, GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.actor import RolloutActor
from yatt_mm.rollout.worker import RolloutWorker

SAMPLING = SamplingSettings(max_tokens=3)


def actor(*, deadline_s: float) -> RolloutActor:
    spec = EngineSpec(
        model_dir="",
        dtype="float32",
        max_model_len=1,
        max_num_seqs=1,
        kv_cache_bytes=1,
        max_images_per_prompt=0,
        max_videos_per_prompt=0,
        deadline_s=1,
        scope="",
        durable=False,
    )
    return RolloutActor(index=1, spec=spec, dataplane_uri="", num_controllers=2, deadline_s=deadline_s)


def task(slot: int) -> PromptTask:
    return PromptTask(slot=slot, conversation=ask("?"), media=(), num_samples=1, seed=0, name=f"group/{slot}")


def group(slot: int) -> GroupRef:
    ref = Ref(name=f"group/{slot}", kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None, meta={})
    return GroupRef(
        slot=slot,
        ref=ref,
        media=(),
        num_prompt_tokens=1,
        lengths=(1,),
        policy_versions=((0, 0),),
        finish_reasons=("stop",),
    )


class StandIn:
    """A fake worker that answers batches after `seconds`, or fails."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.batches: list[list[int]] = []
        self.engine = self

    async def sleep(self) -> None:
        """Do nothing. The actor calls this when the worker has started."""

    async def generate_batch(self, tasks: Sequence[PromptTask], sampling: SamplingSettings) -> list[GroupRef]:
        self.batches.append([task.slot for task in tasks])
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return [group(task.slot) for task in tasks]


async def meeting(body: RolloutActor, phase: str = "step 1") -> list[Any]:
    calls = [
        body.generate_together(phase, 0, [task(2)], SAMPLING),
        body.generate_together(phase, 1, [task(0)], SAMPLING),
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    worker = StandIn()

    async def start(*_: object) -> Any:
        return worker

    monkeypatch.setattr(RolloutWorker, "start", start)
    return worker


def test_a_batch_may_take_longer_than_the_meeting_of_the_controllers(stand_in: StandIn) -> None:
    async def both() -> list[Any]:
        body = actor(deadline_s=0.1)
        await body.start()
        return await meeting(body)

    stand_in.seconds = 0.5
    first, second = asyncio.run(both())
    assert [found.slot for found in (*first, *second)] == [2, 0]
    assert stand_in.batches == [[0, 2]]


def test_a_controller_that_does_not_come_is_named(stand_in: StandIn) -> None:
    async def alone() -> None:
        body = actor(deadline_s=0.05)
        await body.start()
        await body.generate_together("step 1", 0, [task(0)], SAMPLING)

    with pytest.raises(PhaseAbortedError, match=r"engine 1 waited 0\.05 s in step 1 for controller\(s\) \[1\]"):
        asyncio.run(alone())


def test_all_controllers_hear_of_a_batch_that_fails_and_may_try_again(stand_in: StandIn) -> None:
    async def twice() -> tuple[list[Any], list[Any]]:
        body = actor(deadline_s=5)
        await body.start()
        failed = await meeting(body)
        stand_in.error = None
        return failed, await meeting(body)

    stand_in.error = OSError("no answer")
    failed, again = asyncio.run(twice())
    assert [type(error) for error in failed] == [PhaseAbortedError, OSError]
    assert "engine 1 failed in step 1: OSError: no answer" in str(failed[0])
    assert [found.slot for part in again for found in part] == [2, 0]


def test_a_shutdown_in_the_middle_of_a_start_waits_until_the_start_has_cleaned_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    async def endless_start(*_: object) -> Any:
        told.append("started")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            told.append("cleaned up")

    async def interrupted() -> None:
        body = actor(deadline_s=5)
        await body.shutdown()
        start = asyncio.create_task(body.start())
        async with asyncio.timeout(30):
            while not told:
                await asyncio.sleep(0.001)
            await body.shutdown()
            told.append("shut down")
            with pytest.raises(asyncio.CancelledError):
                await start

    monkeypatch.setattr(RolloutWorker, "start", endless_start)
    asyncio.run(interrupted())
    assert told == ["started", "cleaned up", "shut down"]
