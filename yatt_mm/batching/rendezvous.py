"""The rendezvous, in which controllers meet: gathers, the order of prompts, and the run's step records. Metadata
only.

Every call names its phase (`MeetingKey`). Controllers run the same loop, so they must arrive with the same keys in the
same order. A controller that arrives with another key, fails, or is late ends the phase for all controllers, with an
error that names it. So a crash in one process does not become a hang in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dataplane.core.refs import Ref
from yatt_mm.batching.journal import Journal, StepShare
from yatt_mm.batching.meeting import Meeting, MeetingKey, StepGivenUp
from yatt_mm.batching.packed import Packed
from yatt_mm.batching.run_records import RunRecords
from yatt_mm.batching.step_batches import RoundOutcome, StepBatches
from yatt_mm.common.errors import PhaseAbortedError
from yatt_mm.common.progress import PROGRESS
from yatt_mm.protocol.control import Best, Slot
from yatt_mm.protocol.saved_groups import SavedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int | None
    """The last step whose record was handed over; None if there is none since the run was started."""
    at_step: int
    """The step of the last meeting."""
    phase: str
    """The phase of the last meeting."""
    best: Best | None
    """The best evaluation until that step."""
    kl_coef: float | None
    """The weight of the divergence from the reference in the step after it; None if it is always the same."""
    late: tuple[int, ...] = ()
    """The controllers that gave no sign of life for too long."""


class Rendezvous:
    """The body of a Ray actor with asyncio concurrency.

    Consumes: one call per controller and meeting.
    Produces: the same result for all of them.
    Waits for: the other controllers, up to `deadline_s` after their last sign of life.
    Unblocked by: the last arrival, or `abort`.
    """

    def __init__(
        self,
        *,
        num_controllers: int,
        deadline_s: float,
        batches: StepBatches | None,
        begun: Mapping[int, dict[str, Any]] = MappingProxyType({}),
        journal_bytes: int = 0,
    ) -> None:
        """`batches`: the prompts of the steps; None in an evaluation alone, which has no steps. `begun`: [step] the
        state of the prompts of steps whose groups, or some of them, are there already. `journal_bytes`: see
        `Journal`."""
        self._num = num_controllers
        self._deadline_s = deadline_s
        self._given_batches = batches
        self._begun = begun
        self._journal = Journal(num_controllers=num_controllers, max_bytes=journal_bytes)
        self._restart_count = 0
        self._rooms: dict[int, Meeting] = {}
        self._aborted: str | None = None
        self._late: set[int] = set()
        """The controllers that were too late for a meeting."""
        self._last_seen = [0.0] * num_controllers
        self._records = RunRecords()
        self._is_full = asyncio.Event()
        self._is_stopping = asyncio.Event()
        self._step = -1
        """The latest step of a meeting."""
        self._landed: list[dict[int, SavedGroup]] = [{} for _ in range(num_controllers)]
        """[controller] by position the finished groups of the present step, in a stream."""
        self._before_step: dict[str, Any] = {}
        """The state of the prompts at the beginning of that step."""
        self._progress = Progress(step=None, at_step=0, phase="start", best=None, kl_coef=None)

    @property
    def _batches(self) -> StepBatches:
        assert self._given_batches is not None, "an evaluation draws no prompts"
        return self._given_batches

    async def gather(self, key: MeetingKey, controller: int, value: Any) -> list[Any]:
        """Return the values of all controllers, [C] in controller order.

        Raises:
            PhaseAbortedError: another controller failed, was late, or is at another meeting.
        """
        return await self._meet(key, controller, value, lambda values: values)

    async def draw(self, key: MeetingKey, controller: int, bad: list[int]) -> list[Slot]:
        """Return further prompts for this controller: as many as its share of the round still needs. `bad` has the
        positions of those of its last share that cannot be used; their samples are left out from now on.

        Prompts are dealt to the controllers one after another, so a prompt's position does not depend on which
        controller asks first.
        """

        def deal(values: list[Any]) -> list[list[Slot]]:
            with self._records.says_why():
                return self._batches.deal(values)

        return _share(await self._meet(key, controller, bad, deal), controller)

    async def finish_round(self, key: MeetingKey, controller: int, landed: list[tuple[int, bool]]) -> RoundOutcome:
        """Report this controller's (position, has signal), meet the others, and return whether the batch is full."""

        def finish(values: list[Any]) -> RoundOutcome:
            found = self._batches.finish_round(values)
            if found.is_full:
                self._forget_dropped()
            return found

        outcome: RoundOutcome = await self._meet(key, controller, landed, finish)
        return outcome

    async def open_stream(self, key: MeetingKey, controller: int) -> list[Slot]:
        """Return the prompts with which this controller begins a stream."""

        def deal(_values: list[Any]) -> list[list[Slot]]:
            self._is_full.clear()
            self._last_seen = [time.monotonic()] * self._num
            with self._records.says_why():
                return self._batches.open(self._num)

        return _share(await self._meet(key, controller, None, deal), controller)

    async def land(
        self, controller: int, landed: Sequence[tuple[int, bool | None]], groups: Sequence[SavedGroup] = ()
    ) -> list[Slot]:
        """Report finished groups of this controller: (position, whether it has a signal, or None if it failed).
        `groups`: what is needed of them after a fault.

        Return the prompts that the controller gets for them.
        """
        self._check_aborted()
        if not self._is_full.is_set():  # those that come later may be dropped
            self._landed[controller] |= {group.slot.position: group for group in groups}
        with self._records.says_why():
            slots = [slot for position, signal in landed for slot in self._batches.land(controller, position, signal)]
        if self._batches.outcome is not None and not self._is_full.is_set():
            self._forget_dropped()
            self._is_full.set()
        return slots

    async def landed_groups(self, controller: int) -> list[SavedGroup]:
        """Return the groups of the present step that this controller had finished before a fault."""
        return list(self._landed[controller].values())

    async def wait_full(self, controller: int, timeout_s: float) -> RoundOutcome | None:
        """Return how the batch was filled, once it is; None after `timeout_s`, then ask again.

        Raises:
            PhaseAbortedError: another controller failed, or has given no sign of life for too long.
        """
        self._last_seen[controller] = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_full.wait(), timeout_s)
        self._check_aborted()
        late = [c for c, seen in enumerate(self._last_seen) if time.monotonic() - seen > self._deadline_s]
        if late and self._batches.outcome is None and controller not in late:
            self._late.update(late)
            await self.abort(late[0], f"it gave no sign of life for {self._deadline_s:g} s")
            self._check_aborted()
        return self._batches.outcome

    async def peek(self, count: int) -> list[Slot]:
        """Return the prompts that will be drawn next, if none of them turns out to be bad."""
        return self._batches.order.peek(count)

    async def seen(self, controller: int) -> None:
        """Note a sign of life of a busy controller. The others' deadline counts from its last one."""
        PROGRESS.tick()  # so that those who wait here see that this process lives
        self._last_seen[controller] = time.monotonic()

    async def abort(self, controller: int, reason: str) -> None:
        """End the present and all later phases, until the run is started again. Every waiting controller gets the
        reason."""
        if self._aborted is None:
            self._aborted = f"controller {controller} failed: {reason}"
        self._is_full.set()
        for room in self._rooms.values():
            room.done.set()

    async def stop(self) -> None:
        """Let the run stop: from now on every meeting that may stop gives `StepGivenUp` to all controllers, also to
        those that wait in it now. A meeting to which all have come keeps its result."""
        self._is_stopping.set()
        for room in self._rooms.values():
            if room.key.may_stop and room.result is None:
                room.result = StepGivenUp()
                room.done.set()

    async def wait_stop(self) -> None:
        """Wait until the run is told to stop, or other controllers take over."""
        event = self._is_stopping
        await event.wait()

    async def put_share(self, controller: int, step: int, share: Packed[StepShare], nbytes: int) -> int:
        """Note what a controller brings to the update of a step, and the bytes of its records at the data plane. Return
        the first step whose records must stay."""
        return self._journal.put(step, controller, share, nbytes)

    async def share(self, controller: int, step: int) -> Packed[StepShare] | None:
        """Return what a controller brought to the update of a step; None if a controller had not brought its part."""
        return self._journal.share(step, controller)

    async def shared_refs(self, controller: int) -> dict[int, list[Ref]]:
        """Return [step] the records of this controller that stay until a checkpoint."""
        return self._journal.refs(controller)

    async def drop_shares(self, until: int) -> None:
        """Forget what controllers brought to the updates of the steps `until` this one."""
        self._journal.drop_until(until)

    async def covers(self, first: int, last: int) -> bool:
        """Return True if ranks can be trained again on every step from `first` to `last`."""
        return self._journal.covers(first, last)

    async def progress(self) -> Progress:
        """Return how far the run has come."""
        return replace(self._progress, late=tuple(sorted(self._late)))

    async def restart(self, count: int, step: int) -> None:
        """Begin anew with other controllers, after a fault: `step` is the last one that is finished. The next one goes
        on if every controller had brought its part of it, or with the groups that were finished in a stream; else its
        prompts are drawn again. `count`: the number of restarts."""
        self._restart_count = count
        self._aborted = None
        self._late = set()
        before, self._is_stopping = self._is_stopping, asyncio.Event()
        if before.is_set():
            self._is_stopping.set()
        before.set()  # the calls of controllers that are gone end
        for room in self._rooms.values():
            room.done.set()
        self._rooms = {}
        self._is_full.clear()
        self._journal.drop_incomplete()
        if self._given_batches is not None and self._step > step and not self._journal.covers(self._step, self._step):
            anew = self._begun.get(self._step, self._before_step)
            has_groups = any(self._landed)
            self._given_batches = self._given_batches.back_at(self._batches.begun_state() if has_groups else anew)
            self._given_batches.begin_step()

    async def sampling_state(self, step: int) -> dict[str, Any]:
        """Return for a checkpoint the state of the prompts after `step`: the present step, or the step before it, where
        the present one is given up."""
        return self._batches.state() if step == self._step else self._before_step

    async def begun_state(self) -> dict[str, Any]:
        """Return the state of the prompts from which the present step goes on, if it is given up now."""
        return self._batches.begun_state()

    async def finish_step(self, record: dict[str, Any], best: Best | None, kl_coef: float | None) -> None:
        """Hand the record of a step to the launcher. The step is finished then: a restart goes on after it."""
        self._progress = replace(self._progress, step=record["step"], best=best, kl_coef=kl_coef)
        await self.put_record(record)

    async def put_record(self, record: dict[str, Any]) -> bool:
        """Hand a record to the launcher (a step's metrics, a quarantined medium, a notice). Return False for a notice
        that was handed over before: after a fault it comes again."""
        return self._records.put(record)

    async def why_left_out(self) -> str:
        """Return why samples were left out, as the end of an error's message; empty if none was."""
        return self._records.why_left_out()

    async def take_records(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the records since the last call. Waits up to `timeout_s` for the first one."""
        return await self._records.take(timeout_s)

    async def news(self, timeout_s: float) -> tuple[list[dict[str, Any]], Progress]:
        """Return what `take_records` returns, and how far the run has come."""
        return await self.take_records(timeout_s), self._progress

    def _forget_dropped(self) -> None:
        """Forget the groups whose records controllers release when a batch is full."""
        for of_one in self._landed:
            for position in of_one.keys() & self._batches.dropped:
                del of_one[position]

    async def _meet(self, key: MeetingKey, controller: int, value: Any, finish: Callable[[list[Any]], Any]) -> Any:
        self._check(key, controller)
        PROGRESS.tick()
        room = self._rooms.setdefault(key.sequence, Meeting(key))
        if room.key != key:
            await self.abort(controller, f"it came to {key} where the others are at {room.key}")
            raise PhaseAbortedError(str(self._aborted))
        if key.step > self._step:
            self._step = key.step
            self._landed = [{} for _ in range(self._num)]
            if self._given_batches is not None:
                self._before_step = self._given_batches.state()
                if key.step in self._begun:
                    self._given_batches = self._given_batches.back_at(self._begun[key.step])
                self._given_batches.begin_step()
        self._progress = replace(self._progress, at_step=key.step, phase=key.phase)
        room.values[controller] = value
        if key.may_stop and self._is_stopping.is_set() and room.result is None:
            room.result = StepGivenUp()
            room.done.set()
        elif len(room.values) == self._num and room.result is None:
            room.result = finish([room.values[c] for c in range(self._num)])
            room.done.set()
        await self._wait(room)
        if room.result is None:
            raise PhaseAbortedError(str(self._aborted))
        room.num_left += 1
        if room.num_left == self._num:
            del self._rooms[key.sequence]
        return room.result

    async def _wait(self, room: Meeting) -> None:
        """Wait until the last controller arrives, or until a missing one has given no sign of life for too long."""
        arrived = time.monotonic()
        while not room.done.is_set():
            missing = sorted(set(range(self._num)) - set(room.values))
            left_s = {c: max(arrived, self._last_seen[c]) + self._deadline_s - time.monotonic() for c in missing}
            late = [c for c in missing if left_s[c] <= 0]
            if late:
                names = ", ".join(str(c) for c in late)
                self._late.update(late)
                await self.abort(late[0], f"controller(s) {names} did not reach {room.key} in {self._deadline_s:g} s")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(room.done.wait(), min(left_s.values()))

    def _check(self, key: MeetingKey, controller: int) -> None:
        if key.restart_count != self._restart_count:
            raise PhaseAbortedError(
                f"controller {controller} belongs to restart {key.restart_count}; this run is at {self._restart_count}"
            )
        self._check_aborted()

    def _check_aborted(self) -> None:
        if self._aborted is not None:
            raise PhaseAbortedError(self._aborted)


def _share(result: Any, controller: int) -> Any:
    """Return a controller's part of a meeting's result; the run's stop has no parts."""
    return result if isinstance(result, StepGivenUp) else result[controller]
