"""The rendezvous as a controller sees it: one typed method for each of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from dataplane.core.refs import Ref
from yatt_mm.batching.journal import StepShare
from yatt_mm.batching.meeting import MeetingKey, StepGivenUp
from yatt_mm.batching.packed import Packed
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.common.errors import StopRequested
from yatt_mm.common.host_progress import HostProgress
from yatt_mm.common.ray_calls import ask_actor
from yatt_mm.protocol.control import Best, Slot
from yatt_mm.protocol.saved_groups import SavedGroup

T = TypeVar("T")

FIRST_AFTER_STOP = 10**9
"""The number of the first meeting after the run was told to stop. Controllers give the step up at different meetings,
so from then on they count anew."""


class RendezvousClient:
    """Calls the rendezvous for one controller, always with a deadline. `Rendezvous` says what each call does.

    Every method but the awaitable ones raises WorkerError if the rendezvous failed or did not reply in time; the error
    of another controller arrives in this way. The methods that meet the other controllers raise StopRequested while
    `may_stop`, after the run was told to stop.
    """

    def __init__(
        self,
        actor: Any,
        *,
        controller: int,
        restart_count: int,
        step: int,
        deadline_s: float,
        progress: HostProgress,
    ) -> None:
        """`actor`: the handle of the Ray actor. `step`: the number of finished steps. `progress` tells whether the
        rendezvous is at work."""
        self.step = step
        """The step of the run, in the name of every meeting."""
        self.phase = "start"
        """The part of the step that the controller is in, in the name of every meeting."""
        self.may_stop = False
        """True while the step can be given up."""
        self._actor = actor
        self._controller = controller
        self._restart_count = restart_count
        self._deadline_s = deadline_s
        self._progress = progress
        self._num_meetings = 0
        self._stop: Any = None

    def gather(self, value: T) -> list[T]:
        """Meet the other controllers, and return [C] the values that all of them brought."""
        brought: list[Packed[T]] = self._meet(Rendezvous.gather, Packed.of(value))
        return [one.open() for one in brought]

    def draw(self, bad: Sequence[int]) -> list[Slot]:
        """Meet the other controllers, and return this controller's further prompts of the round."""
        return self._meet(Rendezvous.draw, list(bad))

    def finish_round(self, landed: Sequence[tuple[int, bool]]) -> RoundOutcome:
        """Meet the other controllers at the end of a round, and return whether the batch is full."""
        return self._meet(Rendezvous.finish_round, list(landed))

    def open_stream(self) -> list[Slot]:
        """Meet the other controllers, and return the prompts with which this one begins a stream."""
        return self._meet(Rendezvous.open_stream)

    def land(
        self, landed: Sequence[tuple[int, bool | None]], groups: Sequence[SavedGroup] = ()
    ) -> Awaitable[list[Slot]]:
        """Report finished groups of the stream; the result has the prompts that this controller gets for them."""
        return self._actor.land.remote(self._controller, list(landed), list(groups))

    def landed_groups(self) -> list[SavedGroup]:
        """Return the groups of the present step that this controller had finished before a fault."""
        return self._ask(Rendezvous.landed_groups, self._controller)

    def wait_full(self, timeout_s: float) -> Awaitable[RoundOutcome | None]:
        """Wait up to `timeout_s` until the stream's batch is full; the result is None if it is not."""
        return self._actor.wait_full.remote(self._controller, timeout_s)

    def seen(self) -> None:
        """Give a sign of life. Does not wait."""
        self._actor.seen.remote(self._controller)

    def peek(self, count: int) -> list[Slot]:
        """Return the prompts that will be drawn next, if none of them turns out to be bad."""
        return self._ask(Rendezvous.peek, count)

    def stop_asked(self) -> Awaitable[None]:
        """Return a call that ends when the run is told to stop; it is the same one each time."""
        if self._stop is None:
            self._stop = self._actor.wait_stop.remote()
        return self._stop

    def give_up_step(self) -> None:
        """Go back to the step before, as all controllers do when the run was told to stop."""
        self.step -= 1
        self.may_stop = False
        self._num_meetings = FIRST_AFTER_STOP

    def sampling_state(self) -> dict[str, Any]:
        """Return the state of the prompts after `step`, for a checkpoint."""
        return self._ask(Rendezvous.sampling_state, self.step)

    def begun_state(self) -> dict[str, Any]:
        """Return the state of the prompts from which the step that was given up goes on."""
        return self._ask(Rendezvous.begun_state)

    def why_left_out(self) -> str:
        """Return why samples were left out, as the end of an error's message; empty if none was."""
        return self._ask(Rendezvous.why_left_out)

    def put_share(self, share: StepShare) -> int:
        """Bring what this controller has for the update of the present step, before it meets the others there. Return
        the first step whose records must stay."""
        return self._ask(Rendezvous.put_share, self._controller, self.step, Packed.of(share), share.nbytes)

    def share(self, step: int) -> StepShare | None:
        """Return what this controller brought to the update of a step before a fault; None if not all had."""
        packed: Packed[StepShare] | None = self._ask(Rendezvous.share, self._controller, step)
        return None if packed is None else packed.open()

    def shared_refs(self) -> dict[int, list[Ref]]:
        """Return [step] this controller's records that stay until a checkpoint."""
        return self._ask(Rendezvous.shared_refs, self._controller)

    def drop_shares(self, until: int) -> None:
        """Let the rendezvous forget what was brought to the updates of the steps `until` this one."""
        self._ask(Rendezvous.drop_shares, until)

    def finish_step(self, record: dict[str, Any], best: Best | None, kl_coef: float | None) -> None:
        """Hand the record of a step to the launcher: it is finished."""
        self._ask(Rendezvous.finish_step, {"kind": "step", "step": self.step, **record}, best, kl_coef)

    def put_record(self, record: dict[str, Any]) -> bool:
        """Hand a record to the launcher. Return False for a notice that it has."""
        return self._ask(Rendezvous.put_record, record)

    def abort(self, reason: str) -> None:
        """Tell the other controllers that this one has failed."""
        self._ask(Rendezvous.abort, self._controller, reason)

    def _meet(self, method: Any, *arguments: Any) -> Any:
        key = MeetingKey(
            step=self.step,
            phase=self.phase,
            restart_count=self._restart_count,
            sequence=self._num_meetings,
            may_stop=self.may_stop,
        )
        self._num_meetings += 1
        result = self._ask(method, key, self._controller, *arguments)
        if isinstance(result, StepGivenUp):
            raise StopRequested("the run was told to stop")
        return result

    def _ask(self, method: Any, *arguments: Any) -> Any:
        """Call the rendezvous. It ends meetings that last too long; its own silence is noticed here."""
        return ask_actor(
            "the rendezvous",
            self._actor,
            method,
            *arguments,
            deadline_s=self._deadline_s,
            done_by=lambda: self._progress.of(["the rendezvous"]),
        )
