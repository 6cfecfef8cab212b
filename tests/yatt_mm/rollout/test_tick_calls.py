"""Tests of calls that are made together: what goes out in one call, and what one failing item means for the others."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from yatt_mm.rollout.tick_calls import TickCalls


class BadNumberError(Exception):
    """One number is at fault."""


def run_with(
    function: Callable[[list[int]], Sequence[int]],
    scenario: Callable[[TickCalls[int, int]], Coroutine[Any, Any, None]],
    max_size: int = 100,
) -> None:
    """Run a scenario with calls of `function`, within 20 seconds."""
    threads = ThreadPoolExecutor(4)

    async def limited() -> None:
        calls = TickCalls(function, threads, size_of=abs, max_size=max_size, errors_of_one=(BadNumberError,))
        await asyncio.wait_for(scenario(calls), 20)

    try:
        asyncio.run(limited())
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


class Squares:
    """A function that squares; it notes what it was called with, and fails for the numbers in `bad`."""

    def __init__(self, bad: Sequence[int] = (), error: type[Exception] = BadNumberError) -> None:
        self.bad = bad
        self.error = error
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append(items)
        for item in items:
            if item in self.bad:
                raise self.error(f"{item} is bad")
        return [item * item for item in items]


def test_the_items_of_a_tick_go_out_in_one_call_and_each_gets_its_own_reply() -> None:
    squares = Squares()

    async def scenario(calls: TickCalls[int, int]) -> None:
        assert await asyncio.gather(*map(calls, range(5))) == [0, 1, 4, 9, 16]
        assert await calls(7) == 49

    run_with(squares, scenario)
    assert squares.calls == [[0, 1, 2, 3, 4], [7]]


def test_a_call_has_items_up_to_the_given_size_or_one_that_is_larger() -> None:
    squares = Squares()

    async def scenario(calls: TickCalls[int, int]) -> None:
        assert await asyncio.gather(*map(calls, [1, 2, 3, 4, 9, 0, 5])) == [1, 4, 9, 16, 81, 0, 25]

    run_with(squares, scenario, max_size=5)
    assert sorted(squares.calls) == [[0, 5], [1, 2], [3], [4], [9]]


def test_an_item_that_fails_does_not_fail_the_others_of_its_tick() -> None:
    squares = Squares(bad=[2])

    async def scenario(calls: TickCalls[int, int]) -> None:
        replies = await asyncio.gather(*map(calls, range(4)), return_exceptions=True)
        assert [replies[0], replies[1], replies[3]] == [0, 1, 9]
        assert repr(replies[2]) == "BadNumberError('2 is bad')"

    run_with(squares, scenario)
    assert sorted(squares.calls) == [[0], [0, 1, 2, 3], [1], [2], [3]]


def test_an_error_that_is_not_of_one_item_is_that_of_all_and_costs_no_further_call() -> None:
    squares = Squares(bad=[2], error=TimeoutError)

    async def scenario(calls: TickCalls[int, int]) -> None:
        replies = await asyncio.gather(*map(calls, range(4)), return_exceptions=True)
        assert all(isinstance(reply, TimeoutError) for reply in replies)

    run_with(squares, scenario)
    assert squares.calls == [[0, 1, 2, 3]]


def test_a_tick_does_not_wait_for_the_call_of_an_earlier_one() -> None:
    is_free = threading.Event()

    def slow_if_negative(items: list[int]) -> list[int]:
        if items[0] < 0:
            assert is_free.wait(10)
        return items

    async def scenario(calls: TickCalls[int, int]) -> None:
        first = asyncio.ensure_future(calls(-1))
        await asyncio.sleep(0.05)
        assert await calls(1) == 1
        assert not first.done()
        is_free.set()
        assert await first == -1

    run_with(slow_if_negative, scenario)


@pytest.mark.parametrize("bad", [[], [1]])
def test_who_is_cancelled_takes_nothing_from_the_others(bad: list[int]) -> None:
    squares = Squares(bad)

    async def scenario(calls: TickCalls[int, int]) -> None:
        asked = [asyncio.ensure_future(calls(item)) for item in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        asked[1].cancel()
        assert await asked[2] == 4
        for one in asked[:2]:
            with pytest.raises(asyncio.CancelledError):
                await one

    run_with(squares, scenario)


def test_a_call_fails_at_once_when_the_threads_have_ended() -> None:
    async def scenario(calls: TickCalls[int, int]) -> None:
        calls._threads.shutdown()
        with pytest.raises(RuntimeError, match="shutdown"):
            await calls(1)

    run_with(Squares(), scenario)


def test_a_function_that_returns_too_few_replies_is_an_error() -> None:
    async def scenario(calls: TickCalls[int, int]) -> None:
        with pytest.raises(ValueError, match="shorter"):
            await calls(1)

    run_with(lambda items: [], scenario)
