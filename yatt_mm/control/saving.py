"""One controller's part in saving the run: its ranks write, and controller 0 commits."""

from __future__ import annotations

from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.config.run_config import Config
from yatt_mm.control.best_model import BestModel
from yatt_mm.control.commit import Commit
from yatt_mm.control.kl_coefficient import KlCoefficient
from yatt_mm.control.worker_calls import WorkerCalls
from yatt_mm.generation.batch_filler import EnterPhase
from yatt_mm.protocol.control import Team
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.step_meter import StepMeter


class CheckpointSaver:
    """Saves checkpoints, one at a time. Every controller calls its methods at the same moments."""

    def __init__(
        self,
        config: Config,
        team: Team,
        rendezvous: RendezvousClient,
        workers: WorkerCalls,
        meter: StepMeter,
        best: BestModel,
        kl: KlCoefficient,
        enter_phase: EnterPhase,
        *,
        controller: int,
    ) -> None:
        self._config = config
        self._team = team
        self._rendezvous = rendezvous
        self._workers = workers
        self._meter = meter
        self._best = best
        self._kl = kl
        self._enter_phase = enter_phase
        self._controller = controller
        self._saving: int | None = None
        """The step that is being saved, from `save` to `finish`."""
        self._commit: Commit | None = None
        """The commit of the checkpoint that is being written, in controller 0."""

    def save(self, step: int) -> None:
        """Begin to save the run after `step`. The checkpoint counts as soon as it is written."""
        checkpoints = self._team.checkpoints
        with self._enter_phase(Phase.TRAIN, clock="checkpoint"):
            directory = checkpoints.begin(step)
            limit_s = self._config.faults.save_deadline_s
            self._workers.on_my_ranks("save", str(directory), self._config.checkpoint.asynchronous, at_most_s=limit_s)
            self._saving = step
            if self._controller == 0:
                state = {"step": step, "best": self._best.state(), "kl_coef": self._kl.state}
                state |= {"config": self._config.model_dump(mode="json")} | self._rendezvous.sampling_state()
                num_ranks = len(self._team.ranks)
                self._commit = Commit(checkpoints, step, state, num_ranks=num_ranks, best=self._best.step)

    def finish(self) -> int | None:
        """Wait until the checkpoint that is being written, if there is one, is committed; return its step.

        Raises:
            WorkerError: a rank could not write its part, or they were late.
            DiskError: the checkpoint could not be committed.
        """
        if self._saving is None:
            return None
        saved, self._saving = self._saving, None
        self._rendezvous.phase = "checkpoint"
        with self._meter.timed("time/checkpoint_s"):
            self._workers.on_my_ranks("finish_save", at_most_s=self._config.faults.save_deadline_s)
            self._rendezvous.gather(None)
            if self._commit is not None:
                self._commit.finish(deadline_s=self._config.controllers.deadline_s)
                self._meter.add_max("time/commit_s", self._commit.seconds)
                self._commit = None
            self._rendezvous.gather(None)
        return saved

    def has_saved_until(self, step: int) -> bool:
        """Return True if there is, or will be, a checkpoint of `step` or of one before it, as controller 0 sees it."""
        steps = [*self._team.checkpoints.steps(), *([] if self._saving is None else [self._saving])]
        return self._rendezvous.gather(any(saved <= step for saved in steps))[0]

    def has_saved(self, step: int) -> bool:
        """Return True if there is a checkpoint of `step`, as controller 0 sees it."""
        return self._rendezvous.gather(step in self._team.checkpoints.steps())[0]
