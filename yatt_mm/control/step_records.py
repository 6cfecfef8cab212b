"""One controller's records since the last checkpoint. They stay at the data plane, because a step that a fault broke
off goes on from them, and new training ranks are trained on them again."""

from __future__ import annotations

from dataplane.core.refs import Ref
from yatt_mm.batching.journal import StepShare
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.control.kept_rollouts import KeptRollouts
from yatt_mm.protocol.step_meter import StepMeter


class StepRecords:
    """The records of the groups that this controller has given to its ranks."""

    def __init__(self, rendezvous: RendezvousClient, kept: KeptRollouts, meter: StepMeter, *, is_restart: bool) -> None:
        """`is_restart`: True if another controller had records before this one, which are taken over."""
        self._rendezvous = rendezvous
        self._kept = kept
        self._meter = meter
        self._may_have_share = is_restart
        """True until the first step after a restart: only that one can be broken off."""
        self._refs: dict[int, list[Ref]] = rendezvous.shared_refs() if is_restart else {}
        """[step] the records that are not released."""

    def put(self, step: int, share: StepShare) -> None:
        """Note the groups of a step before they are trained on. Earlier ones are released if they become too many."""
        with self._meter.timed("time/journal_s"):
            first = self._rendezvous.put_share(share)
            self._refs[step] = [group.group.ref for group in share.groups]
            self._release_until(first - 1)

    def take(self, step: int) -> StepShare | None:
        """Return what this controller had for the step that a fault broke off; None if it has to be done from its
        beginning."""
        may_have_share, self._may_have_share = self._may_have_share, False
        return self._rendezvous.share(step) if may_have_share else None

    def forget(self, until: int, *, tells: bool) -> None:
        """Release the records of all steps `until` this one, of which there is a checkpoint. `tells`: True in one
        controller, which lets the rendezvous forget them."""
        if tells:
            self._rendezvous.drop_shares(until)
        self._release_until(until)

    def _release_until(self, step: int) -> None:
        for old in [other for other in self._refs if other <= step]:
            self._kept.release(self._refs.pop(old))
