"""Tests of waiting for calls to actors: which error a caller gets."""

import asyncio

import pytest
import ray

from yatt_mm.common.errors import RewardError, WorkerError, YattError
from yatt_mm.common.ray_calls import own_words, reply_of


def test_a_workers_own_timeout_is_told_in_its_words_and_not_taken_for_the_callers() -> None:
    error = ray.exceptions.RayTaskError("score", "", TimeoutError("the node did not reply in 5 s"))

    async def call() -> None:
        raise error.as_instanceof_cause()

    for deadline_s in (None, 60.0):
        with pytest.raises(WorkerError, match="engine 0 failed at sampling: TimeoutError: the node did not reply"):
            asyncio.run(reply_of(call(), name="engine 0", what="sampling", deadline_s=deadline_s))


def test_a_call_that_takes_longer_than_its_deadline_is_named() -> None:
    with pytest.raises(WorkerError, match=r"engine 0 did not finish sampling in 0\.01 s"):
        asyncio.run(reply_of(asyncio.sleep(60), name="engine 0", what="sampling", deadline_s=0.01))


@pytest.mark.parametrize(
    ("raised", "wanted", "words"),
    [
        (RewardError("all rewards failed"), RewardError, "^all rewards failed$"),
        (KeyError("step"), WorkerError, "^controller 0 failed at the run: KeyError: 'step'$"),
    ],
)
def test_an_error_of_this_package_is_told_without_who_passed_it_on(
    raised: Exception, wanted: type[YattError], words: str
) -> None:
    async def call() -> None:
        raise ray.exceptions.RayTaskError("run", "", raised).as_instanceof_cause()

    with pytest.raises(wanted, match=words), own_words():
        asyncio.run(reply_of(call(), name="controller 0", what="the run"))
