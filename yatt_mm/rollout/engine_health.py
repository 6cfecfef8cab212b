"""Whether an engine is usable, and the limits of everything that waits for it, with errors that name the engine and
what it was doing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from yatt_mm.rollout.engine_types import EngineError, EngineTimeoutError
from yatt_mm.rollout.engine_waits import EngineWaits


class EngineHealth:
    """Whether one engine still works, and the time limits of the waits for it. Used from one event loop."""

    def __init__(self, name: str, timeout_s: float, describe: Callable[[], str]) -> None:
        """`describe` returns what a timeout's error says about the engine's present work."""
        self.failure: str | None = None
        """Why the engine is unusable; None while it works."""
        self._name = name
        self.timeout_s = timeout_s
        """The limit of every wait, in seconds."""
        self._describe = describe
        self._waits = EngineWaits()
        self.note_progress = self._waits.note_progress

    def check(self) -> None:
        """Raise EngineError if the engine has failed."""
        if self.failure:
            raise EngineError(f"engine {self._name} is unusable: {self.failure}; start another")

    def give_up(self, reason: str) -> None:
        """Make the engine unusable and end every wait now; vLLM itself would never end them."""
        self.failure = self.failure or reason
        self._waits.end_all()

    @asynccontextmanager
    async def only_whole(self, what: str) -> AsyncIterator[None]:
        """Mark the engine unusable if the block, a change of its state or weights, fails or exceeds its timeout."""
        try:
            async with self.deadline(what):
                yield
        except Exception as error:
            self.failure = f"{what} failed ({type(error).__name__}: {error})"
            raise EngineError(f"engine {self._name} failed {what}: {error}") from error
        except asyncio.CancelledError:
            self.failure = f"{what} was cancelled"
            raise

    def deadline(self, what: str) -> AbstractAsyncContextManager[None]:
        """Limit a `with` block to `timeout_s` seconds."""
        late = f"did not finish {what} within {self.timeout_s:g} s"
        return self._bounded(self._waits.at_most(self.timeout_s), what, late)

    def progress(self, what: str) -> AbstractAsyncContextManager[None]:
        """Limit the time in which the engine finishes nothing.

        A limit for each request would be wrong, because requests may queue behind others.
        """
        late = f"finished nothing for {self.timeout_s:g} s while it had {what} to compute"
        return self._bounded(self._waits.while_progressing(self.timeout_s), what, late)

    @asynccontextmanager
    async def _bounded(self, bound: AbstractAsyncContextManager[object], what: str, late: str) -> AsyncIterator[None]:
        """Turn the end of a limited wait into an error that names the engine and what it was doing."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with bound:
                yield
        except (TimeoutError, EngineDeadError) as error:
            if self.failure is None and isinstance(error, EngineDeadError):
                self.failure = "its process died"
            if self.failure is not None:
                raise EngineError(f"engine {self._name} gave up {what}: {self.failure}") from error
            raise EngineTimeoutError(f"engine {self._name} {late} ({self._describe()})") from error
