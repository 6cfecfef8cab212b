"""Tests of the deadlines of waits, on a real event loop with times of milliseconds."""

import asyncio
import time

import pytest

from yatt_mm.rollout.engine_waits import EngineWaits


def test_a_wait_goes_on_while_anything_is_finished_and_ends_when_nothing_is() -> None:
    async def elapsed_s() -> float:
        waits, loop = EngineWaits(), asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10), waits.while_progressing(0.2):
                for _ in range(10):
                    await asyncio.sleep(0.05)
                    waits.note_progress()
                await asyncio.Event().wait()
        return loop.time() - started

    assert 0.7 <= asyncio.run(elapsed_s()) < 5


def test_what_was_finished_while_the_loop_was_held_up_counts() -> None:
    async def wait() -> int:
        waits, num_finished = EngineWaits(), 0
        async with asyncio.timeout(10), waits.while_progressing(0.2):
            for _ in range(3):
                sleeping = asyncio.ensure_future(asyncio.sleep(0.1))
                await asyncio.sleep(0)
                time.sleep(0.4)
                await sleeping
                waits.note_progress()
                num_finished += 1
        return num_finished

    assert asyncio.run(wait()) == 3


def test_progress_does_not_lengthen_a_wait_by_the_clock() -> None:
    async def wait() -> None:
        waits = EngineWaits()
        async with asyncio.timeout(10), waits.at_most(0.1):
            while True:
                await asyncio.sleep(0.01)
                waits.note_progress()

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_ending_all_waits_reaches_those_that_are_not_ending_yet() -> None:
    async def late_cleanup(waits: EngineWaits) -> None:
        async with waits.at_most(0):
            try:
                await asyncio.Event().wait()
            finally:
                waits.end_all()  # this very wait is expiring

    async def both() -> list[BaseException | None]:
        waits = EngineWaits()

        async def endless() -> None:
            async with waits.while_progressing(60):
                await asyncio.Event().wait()

        async with asyncio.timeout(10):
            return await asyncio.gather(endless(), late_cleanup(waits), return_exceptions=True)

    assert [type(error) for error in asyncio.run(both())] == [TimeoutError, TimeoutError]
