"""One controller's share of the rollouts that are kept for people to read: which they are, and when their records may
be released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dataplane.client.client import Client
from dataplane.core.refs import Ref
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.generation.batch_filler import FilledBatch
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.kept import KeptGroup, Split

MAX_GROUPS = 32
"""The most groups of one call to the keeper."""


class KeptRollouts:
    """Sends groups to the keeper, which reads them while the run goes on."""

    def __init__(self, keeper: Any, client: Client, config: Config, *, restart_count: int = 0) -> None:
        """`keeper`: the handle of its actor; None if nothing is kept. `restart_count`: of the controllers."""
        self._keeper = keeper
        self._restart_count = restart_count
        self._client = client
        self._config = config
        self._calls: list[tuple[str, Any]] = []
        self._in_use: set[str] = set()
        """The names of records that the keeper may still have to read."""
        self._left: list[Ref] = []
        """Those of them that nothing else needs any more."""

    def keep_batch(self, filled: FilledBatch, *, step: int, all_groups: bool = False) -> None:
        """Send those groups of a step that are kept, or all of them, and release the records that nothing else needs.
        Every controller calls this and `keep_evaluation` at the same moments."""
        carried = filled.outcome.carried
        finished = [group for group in filled.judged if _position(group) not in carried]
        among = self._config.train.prompts_per_step
        kept = [group for group in finished if all_groups or self._is_kept(group, among)]
        self._send(kept, step, "train", trained=filled.kept)
        self.release(filled.dropped)

    def keep_again(self, groups: Sequence[ScoredGroup], *, step: int, all_groups: bool) -> None:
        """Send the groups of a step that a fault broke off, after they were generated. The keeper may have them."""
        among = self._config.train.prompts_per_step
        kept = [group for group in groups if all_groups or self._is_kept(group, among)]
        self._send(kept, step, "train", trained=groups)

    def keep_evaluation(self, shares: Sequence[tuple[Sequence[ScoredGroup], int]], *, step: int) -> None:
        """Send those groups of an evaluation that are kept, and release their records. `shares`: for each held-out set
        its groups and the number of its prompts."""
        kept = [group for groups, among in shares for group in groups if self._is_kept(group, among)]
        self._send(kept, step, "eval")
        self.release([group.group.ref for groups, _ in shares for group in groups])

    def release(self, refs: Sequence[Ref]) -> None:
        """Release records: now, or at the next `finish` if the keeper may still have to read them."""
        self._left += [ref for ref in refs if ref.name in self._in_use]
        self._client.release([ref for ref in refs if ref.name not in self._in_use])

    def finish(self) -> None:
        """Wait until the keeper has read everything that it was sent.

        Raises:
            WorkerError: it failed or was late.
        """
        calls, self._calls = self._calls, []
        wait_all(calls, what="writing rollouts", deadline_s=self._config.controllers.deadline_s)
        left, self._left, self._in_use = self._left, [], set()
        if left:
            self._client.release(left)

    def _is_kept(self, group: ScoredGroup, among: int) -> bool:
        return self._keeper is not None and self._config.rollouts.keeps(_position(group), among)

    def _send(
        self, groups: Sequence[ScoredGroup], step: int, split: Split, *, trained: Sequence[ScoredGroup] = ()
    ) -> None:
        """`trained`: the groups of the step's batch, which have advantages."""
        if self._keeper is None:
            return
        advantages = {_position(group): group.advantages for group in trained}
        kept = [KeptGroup(scored=bare(group), advantages=advantages.get(_position(group))) for group in groups]
        portions = [kept[at : at + MAX_GROUPS] for at in range(0, len(kept), MAX_GROUPS)] or [[]]
        for portion in portions:  # so that the deadline is for a portion, and not for all of them together
            call = self._keeper.keep.remote(
                step, split, portion, is_last=portion is portions[-1], restart_count=self._restart_count
            )
            self._calls.append(("the keeper", call))
        self._in_use |= {group.scored.group.ref.name for group in kept}


def bare(group: ScoredGroup) -> ScoredGroup:
    """Return the group without the sample's other fields, which may be large."""
    return replace(group, prompt=replace(group.prompt, fields={}))


def _position(group: ScoredGroup) -> int:
    return group.prompt.slot.position
