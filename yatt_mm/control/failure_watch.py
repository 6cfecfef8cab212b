"""What a controller does about responses to which the reward function or a judge gave no score: it tells where and why,
once, and ends the run if one of them fails too often, because the scores that stand in for theirs would be learnt."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import RewardError, YattError
from yatt_mm.config.judge_section import JudgeSection
from yatt_mm.config.sections import RewardSection
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.faults import FUNCTION, Fault

Kind = tuple[str, tuple[str, str]]
"""(source, kind of fault)."""


class FailureWatch:
    """The failures of a run. Every controller calls `check` at the same moments."""

    def __init__(
        self,
        rendezvous: RendezvousClient,
        section: RewardSection,
        functions: Sequence[str],
        *,
        before_end: Callable[[], None],
    ) -> None:
        """`functions`: the paths of the run's reward functions. `before_end` is called before an error that ends the
        run."""
        self._rendezvous = rendezvous
        self._before_end = before_end
        self._section = section
        self._functions = " and ".join(functions)
        self._told: set[Kind] = set()

    def check(self, groups: Sequence[ScoredGroup], *, among: str, tells: bool) -> None:
        """Meet the other controllers, tell new kinds of faults, and end the run if the function or a judge fails too
        often.

        among: what these groups are, for messages. tells: True in one controller, which hands over the records.

        Raises:
            RewardError: the function failed on `reward.max_error_frac` of the responses or more, or a judge on more
                than `reward.max_failed_frac` of them.
        """
        shares = self._rendezvous.gather(_counted(groups))
        num_failed, faults, num_responses = Counter[str](), dict[Kind, Fault](), 0
        for num, failed, found in shares:
            num_responses += num
            num_failed.update(failed)
            faults = {**found, **faults}
        for source, kind in faults.keys() - self._told if tells else ():
            counts = {"num_failed": num_failed[source], "num_responses": num_responses, "among": among}
            record = {"kind": "failure", **self._about(source), **counts, **asdict(faults[source, kind])}
            self._rendezvous.put_record(record)
        self._told |= faults.keys()
        too_often = sorted(
            source for source, num in num_failed.items() if self._is_too_often(source, num, num_responses)
        )
        if too_often:
            with contextlib.suppress(YattError):  # the rewards are the reason of the end
                self._before_end()
            self._rendezvous.gather(None)  # the run ends with the first controller that raises
            source = too_often[0]
            fault = next(fault for (of, _), fault in faults.items() if of == source)
            key = "max_error_frac" if source == FUNCTION else "max_failed_frac"
            limit = getattr(self._section, key)
            raise RewardError(
                f"{self._about(source)['who']} failed on {num_failed[source]} of the {num_responses} responses of "
                f"{among}, and reward.{key} is {limit:g}: {fault.what} ({fault.where}); {self._repair(source)}"
                f"{'' if limit == 1 else f', or raise reward.{key}'}"
            )

    def _is_too_often(self, source: str, num_failed: int, num_responses: int) -> bool:
        if source == FUNCTION:
            return num_failed > 0 and num_failed >= self._section.max_error_frac * num_responses
        return num_failed > self._section.max_failed_frac * num_responses

    def _about(self, source: str) -> dict[str, str]:
        """Return who failed, and what the responses score instead."""
        if source == FUNCTION:
            return {"who": f"{source} {self._functions}", "score": "0"}
        score = self._judge(source).score_on_failure
        return {"who": source, "score": f"{score:g} ({source}.score_on_failure)"}

    def _repair(self, source: str) -> str:
        """Return what the user can do about failures."""
        if source == FUNCTION:
            return "repair the function"
        if self._judge(source).url is not None:
            return "see that the server is there and takes such requests"
        return f"see what {source}.template asks, and what the judge says to it (its log)"

    def _judge(self, source: str) -> JudgeSection:
        return self._section.judges[source.rpartition(".")[2]]


def _counted(groups: Sequence[ScoredGroup]) -> tuple[int, Counter[str], dict[Kind, Fault]]:
    """Return (number of responses, number without a score by source, first fault of each kind)."""
    failed, found = Counter[str](), dict[Kind, Fault]()
    for failures in (failures for group in groups for failures in group.failures):
        failed[failures.source] += failures.num
        found.setdefault((failures.source, failures.fault.kind), failures.fault)
    return sum(len(group.rewards) for group in groups), failed, found
