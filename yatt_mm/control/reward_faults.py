"""What a controller does about responses to which the reward function gave no reward: it tells where and why, once, and
ends the run if there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import RewardError
from yatt_mm.config.sections import RewardSection
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.rewards import RewardFault


class RewardFaults:
    """The faults of the reward function, over the whole run. Every controller calls `check` at the same moments."""

    def __init__(self, rendezvous: RendezvousClient, section: RewardSection) -> None:
        self._rendezvous = rendezvous
        self._function = section.function
        self._max_error_frac = section.max_error_frac
        self._told: set[tuple[str, str]] = set()
        """(place, kind of error) of the faults that were told."""

    def check(self, groups: Sequence[ScoredGroup], *, among: str, tells: bool) -> int:
        """Meet the other controllers, and return how many responses of all groups have no reward.

        among: what these groups are, for messages. tells: True in one controller, which hands over the records of new
        faults.

        Raises:
            RewardError: the share is `max_error_frac` or more.
        """
        found: dict[tuple[str, str], RewardFault] = {}
        for group in groups:
            if group.fault is not None:
                found.setdefault(_kind(group.fault), group.fault)
        mine = (sum(group.num_errors for group in groups), sum(len(group.rewards) for group in groups), found)
        shares = self._rendezvous.gather(mine)
        num_errors, num_responses = sum(num for num, _, _ in shares), sum(num for _, num, _ in shares)
        if not num_errors:
            return 0
        faults = {kind: fault for _, _, of_one in reversed(shares) for kind, fault in of_one.items()}
        counts = {"num_errors": num_errors, "num_responses": num_responses, "among": among}
        for kind in faults.keys() - self._told if tells else ():
            record = {"kind": "reward_fault", "function": self._function, **asdict(faults[kind]), **counts}
            self._rendezvous.put_record(record)
        self._told |= faults.keys()
        if num_errors >= self._max_error_frac * num_responses:
            first = next(iter(faults.values()))
            raise RewardError(
                f"reward.function {self._function} failed on {num_errors} of the {num_responses} responses of {among}, "
                f"and reward.max_error_frac is {self._max_error_frac:g}: {first.what} ({first.where}); repair the "
                "function, or raise reward.max_error_frac if it is below 1"
            )
        return num_errors


def _kind(fault: RewardFault) -> tuple[str, str]:
    """Return the place and the kind of an error, so that each is told once."""
    return fault.where, fault.what.partition(":")[0]
