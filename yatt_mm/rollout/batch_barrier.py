"""A barrier at one engine: collects the tasks of all controllers, so that the engine computes them as one batch.

The last bits of a result depend on what the engine computes at the same time. A deterministic run therefore gives an
engine all tasks of a phase at once, in the run's order.

The controllers themselves meet in `yatt_mm.batching.rendezvous`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from yatt_mm.common.errors import PhaseAbortedError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Batch(Generic[T, R]):
    """The tasks of one phase and their results."""

    tasks: dict[int, Mapping[int, T]] = field(default_factory=dict)
    """[controller] Its tasks by their place in the run's order."""
    is_met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all controllers have sent their tasks."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `results` or `error` is there."""
    results: dict[int, R] = field(default_factory=dict)
    """[place in the run's order] The task's result."""
    error: str | None = None
    """The reason for which the batch failed; None if it did not."""


class BatchBarrier(Generic[T, R]):
    """The barrier of all controllers at one engine.

    Consumes: each controller's tasks by their place in the run's order.  Produces: their results.
    Waits for: the other controllers' tasks of the same phase, up to the deadline; then for the batch. The wait for the
    batch has no timeout here: the engine ends the batch if it finishes nothing for too long.
    """

    def __init__(self, name: str, *, num_controllers: int, deadline_s: float) -> None:
        """`name`: what errors call the engine. `deadline_s`: timeout for the tasks of the other controllers."""
        self._name = name
        self._num_controllers = num_controllers
        self._deadline_s = deadline_s
        self._batches: dict[str, _Batch[T, R]] = {}

    async def join(
        self, phase: str, controller: int, tasks: Mapping[int, T], run: Callable[[list[T]], Awaitable[list[R]]]
    ) -> list[R]:
        """Return the results of this controller's tasks, in their order.

        The last controller to join calls `run` with the tasks of all controllers.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        batch = self._batches.setdefault(phase, _Batch())
        batch.tasks[controller] = tasks
        if len(batch.tasks) == self._num_controllers:
            del self._batches[phase]
            batch.is_met.set()
            await _run(batch, run)
        try:
            await asyncio.wait_for(batch.is_met.wait(), self._deadline_s)
        except TimeoutError:
            missing = sorted(set(range(self._num_controllers)) - set(batch.tasks))
            raise PhaseAbortedError(
                f"{self._name} waited {self._deadline_s:g} s in {phase} for controller(s) {missing}"
            ) from None
        await batch.done.wait()
        if batch.error is not None:
            raise PhaseAbortedError(f"{self._name} failed in {phase}: {batch.error}")
        return [batch.results[place] for place in tasks]


async def _run(batch: _Batch[T, R], run: Callable[[list[T]], Awaitable[list[R]]]) -> None:
    """Compute the whole batch, and set its results or its error."""
    tasks = {place: task for part in batch.tasks.values() for place, task in part.items()}
    order = sorted(tasks)
    try:
        if tasks:
            batch.results = dict(zip(order, await run([tasks[place] for place in order]), strict=True))
    except Exception as error:  # the other controllers wait for this batch and must get the error
        batch.error = f"{type(error).__name__}: {error}"
        raise
    except asyncio.CancelledError:
        batch.error = "the call that ran the batch was cancelled"
        raise
    finally:
        batch.done.set()
