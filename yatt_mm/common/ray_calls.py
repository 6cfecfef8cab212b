"""Wait for calls to workers: with a deadline, and with errors that name the worker and what it was doing."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from yatt_mm.common.errors import UnreachableError, WorkerError, YattError

T = TypeVar("T")

POLL_S = 1.0


def wait_all(
    calls: Sequence[tuple[str, ray.ObjectRef]],
    *,
    what: str,
    deadline_s: float,
    at_most_s: float = math.inf,
    done_by: Callable[[], object] = lambda: None,
    on_done: Callable[[str], object] = lambda name: None,
) -> list[Any]:
    """Return the results of `(worker name, call)` pairs, in order. The first failure ends the wait for all.

    deadline_s: the longest time in which nothing is done. at_most_s: the longest time of the whole. done_by: what the
    workers have done so far; another value than before means that they are at work. on_done: called with the worker's
    name whenever one has replied.

    Raises:
        WorkerError: a worker raised, died, or did not reply in time.
    """
    pending = {call: name for name, call in calls}
    left, began_s, before = list(pending), time.monotonic(), None
    last_s = began_s
    while left:
        now_s = time.monotonic()
        limit_s = min(deadline_s + last_s, at_most_s + began_s) - now_s
        done, left = ray.wait(left, num_returns=1, timeout=max(0.0, min(limit_s, POLL_S)))
        if done:
            fetch(done[0], name=pending[done[0]], what=what)
            on_done(pending[done[0]])
            last_s = time.monotonic()
        elif now_s - began_s >= at_most_s:
            raise _late(left, pending, what, at_most_s)
        elif before is None:  # most replies come sooner, and to ask may cost calls to other hosts
            before = (done_by(),)
        elif (now := (done_by(),)) != before:
            before, last_s = now, time.monotonic()
        elif limit_s <= 0:
            raise _late(left, pending, what, deadline_s)
    return [fetch(call, name=name, what=what) for name, call in calls]


def _late(left: Sequence[ray.ObjectRef], names: Mapping[ray.ObjectRef, str], what: str, limit_s: float) -> WorkerError:
    late = ", ".join(sorted({names[call] for call in left}))
    return WorkerError(f"{late} did not finish {what} in {limit_s:g} s")


def fetch(call: ray.ObjectRef, *, name: str, what: str) -> Any:
    """Return the result of one finished call.

    Raises:
        WorkerError: the worker raised or died; the message ends with the worker's message.
    """
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        raise _worker_error(error, name, what) from error


def ask_actor(
    name: str,
    actor: Any,
    method: Callable[..., Any],
    *arguments: Any,
    deadline_s: float,
    done_by: Callable[[], object] = lambda: None,
) -> Any:
    """Call a method of an actor that serves all controllers, and return its result.

    `method`: the function of the actor's class, so that a search for its name finds its callers. The call waits half as
    long again as `deadline_s`, because the deadlines inside such an actor end earlier and their errors say more.
    `done_by`: see `wait_all`.

    Raises:
        WorkerError: the actor raised, died, or did not reply in time.
    """
    call = getattr(actor, method.__name__).remote(*arguments)
    return wait_all([(name, call)], what=method.__name__, deadline_s=deadline_s * 1.5, done_by=done_by)[0]


async def reply_of(call: Awaitable[T], *, name: str, what: str, deadline_s: float | None = None) -> T:
    """Return the result of a call, inside an event loop.

    Raises:
        WorkerError: the worker raised, died, or did not reply in `deadline_s` seconds.
    """
    try:
        return await asyncio.wait_for(call, deadline_s)
    except ray.exceptions.RayError as error:  # before TimeoutError: a worker's own TimeoutError is both
        raise _worker_error(error, name, what) from error
    except TimeoutError as error:
        raise WorkerError(f"{name} did not finish {what} in {deadline_s:g} s") from error


@contextmanager
def own_words() -> Iterator[None]:
    """Raise an error of this package that a worker raised as it is, without who passed it on: it is a whole sentence.

    Raises:
        YattError: what the worker raised, or WorkerError if that was an error of another package.
    """
    try:
        yield
    except WorkerError as error:
        passed_on = error.__cause__
        if isinstance(passed_on, ray.exceptions.RayTaskError) and isinstance(passed_on.cause, YattError):
            raise passed_on.cause from error
        raise


def _worker_error(error: ray.exceptions.RayError, name: str, what: str) -> WorkerError:
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        # errors of this package are whole sentences
        why = str(cause) if isinstance(cause, YattError) else f"{type(cause).__name__}: {cause}"
        kind = UnreachableError if isinstance(cause, UnreachableError) else WorkerError
        return kind(f"{name} failed at {what}: {why}")
    words = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours its messages
    lines = words.strip().splitlines()
    why = lines[-1] if "in its creation task" in lines[0] else lines[0]  # the last line of a traceback says more
    if isinstance(error, ray.exceptions.ActorUnavailableError) and "unavailable: restarting" not in why:
        return UnreachableError(f"{name} could not be reached during {what}: {why.strip()}")
    return WorkerError(f"{name} was lost during {what}: {why.strip()}")
