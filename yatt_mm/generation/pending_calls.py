"""The event loop of a controller's generation phase: pending calls, and what happens when each of them ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.ray_calls import fetch

POLL_S = 1.0
SIGN_OF_LIFE_S = 1.0
"""The shortest time between two signs of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    name: str
    what: str
    handle: Callable[[Any], None]
    handle_loss: Callable[[WorkerError], bool] | None
    is_progress: bool


class PendingCalls:
    """Waits for many calls at once.

    Waits for: any of the calls.  Unblocked by: its result, its failure, or `deadline_s` without a single result.
    """

    def __init__(self, *, deadline_s: float, on_progress: Callable[[], object]) -> None:
        """`on_progress` is called while results arrive, though not for each one: it is a sign of life."""
        self._deadline_s = deadline_s
        self._on_progress = on_progress
        self._told_s = float("-inf")
        self._soon: dict[Callable[[], None], None] = {}
        self._calls: dict[ray.ObjectRef, _Call] = {}
        self._last_s = time.monotonic()

    def then(
        self,
        call: ray.ObjectRef,
        handle: Callable[[Any], None],
        *,
        name: str,
        what: str,
        handle_loss: Callable[[WorkerError], bool] | None = None,
        is_progress: bool = True,
    ) -> None:
        """Call `handle` with the result of `name` once it is there.

        If the call fails, `handle_loss` is called first; True if it handled the failure. Without `is_progress` the call
        has its own time limit, and its result does not extend the deadline of the others.
        """
        if is_progress and not self._is_working:
            self._last_s = time.monotonic()
        self._calls[call] = _Call(name=name, what=what, handle=handle, handle_loss=handle_loss, is_progress=is_progress)

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action` once, after all replies that are there now have been handled, so that their messages go out as
        one call.

        A call to an actor costs each side about a millisecond, however short it is.
        """
        self._soon[action] = None

    @property
    def is_empty(self) -> bool:
        """True when the results of all calls have been handled."""
        return not self._calls

    def run(self, is_over: Callable[[], bool], *, on_late: Callable[[], bool] = lambda: False) -> None:
        """Handle results until `is_over`.

        `on_late` is called when nothing has ended for too long; True if it did something about it.

        Raises:
            WorkerError: a worker failed, or nothing has ended for `deadline_s`.
        """
        while True:
            self._act_soon()
            if is_over():
                return
            assert self._calls, "nothing is under way and the phase is not over"
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_S)
            if done:
                done, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
                for call in done:
                    self._take(call)
            elif self._is_working and time.monotonic() - self._last_s > self._deadline_s:
                if not on_late():
                    names = ", ".join(sorted({f"{call.name} ({call.what})" for call in self._calls.values()}))
                    raise WorkerError(
                        f"nothing ended for {self._deadline_s:g} s (controllers.deadline_s); waited for {names}"
                    )
                self._last_s = time.monotonic()

    def _act_soon(self) -> None:
        while self._soon:
            action = next(iter(self._soon))
            del self._soon[action]
            action()

    @property
    def _is_working(self) -> bool:
        return any(call.is_progress for call in self._calls.values())

    def _take(self, ref: ray.ObjectRef) -> None:
        call = self._calls.pop(ref)
        if call.is_progress:
            self._last_s = time.monotonic()
            if self._last_s - self._told_s >= SIGN_OF_LIFE_S:
                self._told_s = self._last_s
                self._on_progress()
        try:
            answer = fetch(ref, name=call.name, what=call.what)
        except WorkerError as error:
            if call.handle_loss is None or not call.handle_loss(error):
                raise
            return
        call.handle(answer)
