"""One controller's part in saving what there is of a step before it is trained on, and in going on with that.

Consumes: groups, finished or cut off. Produces: files that the keeper writes, and at another start the same groups.
Waits for: the keeper and the other controllers, with deadlines. No token passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from yatt_mm.batching.journal import StepShare
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import DataError
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.protocol.control import RunStart, Team
from yatt_mm.protocol.saved_groups import SavedGroup, SavedShare, together
from yatt_mm.protocol.step_meter import StepMeter


class BegunStepSaver:
    """Saves begun steps. Every controller calls its methods at the same moments."""

    def __init__(
        self,
        config: Config,
        team: Team,
        start: RunStart,
        prompts: PromptSource,
        rendezvous: RendezvousClient,
        meter: StepMeter,
        *,
        controller: int,
    ) -> None:
        self._config = config
        self._team = team
        self._begun = start.begun
        self._prompts = prompts
        self._rendezvous = rendezvous
        self._meter = meter
        self._controller = controller
        self._is_restart = team.restart_count > 0
        """True until the first step after a fault."""

    def has_whole(self, step: int) -> bool:
        """Return True if the groups of a step were all there when the run was started."""
        return step in self._begun and self._begun[step].is_whole

    def save(self, step: int, share: StepShare) -> None:
        """Save the groups of a step before it is trained on. They are on the disk when this returns.

        Raises:
            DiskError: they could not be written; the message names the file.
            WorkerError: the keeper or another controller failed or was late.
        """
        with self._meter.timed("time/checkpoint_s"):
            mine = SavedShare(
                groups=tuple(GroupWork.of(group).saved() for group in share.groups),
                has_wrong_rewards=share.has_wrong_rewards,
                meter=share.meter,
            )
            self._write(step, mine, is_whole=True, sampling=self._rendezvous.sampling_state)

    def take(self, step: int) -> StepShare | None:
        """Return this controller's share of the groups of a step that were all there when the run was started; None
        for other steps. Their records are at the data plane again.

        Raises:
            DataError: the sample of a group cannot be used any more.
            WorkerError: the keeper or another controller failed or was late.
        """
        if not self.has_whole(step):
            return None
        self._rendezvous.gather(None)  # so that the rendezvous is at this step
        saved = self._put_back(step)
        groups = tuple(work.scored() for work in self._works(saved.groups))
        has_wrong_rewards = any(self._rendezvous.gather(saved.has_wrong_rewards))  # this one may have no file
        return StepShare(groups=groups, has_wrong_rewards=has_wrong_rewards, meter=saved.meter)

    def save_part(
        self, step: int, works: Sequence[GroupWork], meter: StepMeter, sampling: Callable[[], dict[str, Any]]
    ) -> None:
        """Save the groups of a step that have a record, finished or cut off, so that the step goes on with them. Does
        nothing if there are none, or all of them are saved already. `meter`: the metrics of the step until then.
        `sampling`: returns the state of the prompts, in which those of the groups are carried over.

        Raises:
            DiskError: they could not be written; the message names the file.
            WorkerError: the keeper or another controller failed or was late.
        """
        with self._meter.timed("time/checkpoint_s"):
            is_whole = self._rendezvous.gather(self._team.checkpoints.begun.is_whole(step))[0]
            if not is_whole and any(self._rendezvous.gather(len(works))):
                mine = SavedShare(groups=tuple(work.saved() for work in works), meter=meter)
                self._write(step, mine, is_whole=False, sampling=sampling)

    def take_part(self, step: int) -> tuple[list[GroupWork], StepMeter]:
        """Return (this controller's groups of a step that was begun before the run was started, or before a fault, in
        order; the metrics of the step until the start). Their records are at the data plane.

        Raises:
            DataError: the sample of a group cannot be used any more.
            WorkerError: the keeper or another controller failed or was late.
        """
        is_restart, self._is_restart = self._is_restart, False
        if step not in self._begun and not is_restart:
            return [], StepMeter()
        self._rendezvous.gather(None)  # so that the rendezvous is at this step
        saved = self._put_back(step) if step in self._begun else SavedShare(groups=(), meter=StepMeter())
        groups = {group.slot.position: group for group in saved.groups}
        if is_restart:
            groups |= {group.slot.position: group for group in self._rendezvous.landed_groups()}
        return self._works(groups.values()), saved.meter

    def _write(self, step: int, share: SavedShare, *, is_whole: bool, sampling: Callable[[], dict[str, Any]]) -> None:
        begun = self._team.checkpoints.begun
        path = begun.begin(step) / f"groups-{self._controller}.arrow"
        self._ask("saving responses", self._team.keeper.save_groups.remote(path, share))
        self._rendezvous.gather(None)
        if self._controller == 0:
            begun.commit(step, is_whole=is_whole, sampling=sampling(), config=self._config.model_dump(mode="json"))
        self._rendezvous.gather(None)

    def _put_back(self, step: int) -> SavedShare:
        """Store the records of this controller's files at the data plane, and return the groups."""
        files = self._begun[step].files(self._controller, self._config.controllers.num)
        names = [f"rollout/{self._team.run_id}/begun {step} ({self._team.restart_count})" for _ in files]
        return together([self._put_back_one(path, name) for path, name in zip(files, names)])

    def _put_back_one(self, path: Path, name: str) -> SavedShare:
        share: SavedShare = self._ask("reading responses", self._team.keeper.put_back.remote(path, name))
        return share

    def _works(self, saved: Iterable[SavedGroup]) -> list[GroupWork]:
        """Return the groups with their prompts, in the order of the run."""
        groups = sorted(saved, key=lambda group: group.slot.position)
        prompts, notices = self._prompts.load([group.slot for group in groups])
        if notices:
            first = notices[0]
            who = f"sample {first['key'] or '(none)'} in {first['shard']}"
            raise DataError(
                f"{who} cannot be used any more ({first['reason']}), and there are responses to it: put the files of "
                f"data.train back, or remove {self._team.checkpoints.begun.root}/begun_* to sample them anew"
            )
        return [GroupWork.resumed(prompt, group) for prompt, group in zip(prompts, groups)]

    def _ask(self, what: str, call: Any) -> Any:
        limit_s, seen = self._config.faults.save_deadline_s, self._rendezvous.seen
        (result,) = wait_all([("the keeper", call)], what=what, deadline_s=limit_s, done_by=seen)
        return result
