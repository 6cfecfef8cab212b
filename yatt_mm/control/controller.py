"""The controller: the calls of which the training loop is made, on this controller's share of the prompts. All
controllers are equal.

Consumes: samples and refs from the data plane, drawn through the rendezvous.
Produces: calls to engines, reward workers and training ranks; a share of each step's metrics.
Waits for: workers and the other controllers, always with a deadline. It holds refs, lengths and rewards. No pixel,
token or weight passes through it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from yatt_mm.batching.journal import StepShare
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.manifest import write_manifest
from yatt_mm.common.writing import writing
from yatt_mm.config.run_config import Config
from yatt_mm.control.advantages import with_advantages
from yatt_mm.control.begun_step import BegunStepSaver
from yatt_mm.control.best_model import BestModel
from yatt_mm.control.evaluation import Evaluation
from yatt_mm.control.failure_watch import FailureWatch
from yatt_mm.control.kept_rollouts import KeptRollouts, bare
from yatt_mm.control.kl_coefficient import KlCoefficient
from yatt_mm.control.run_client import RunClient
from yatt_mm.control.saving import CheckpointSaver
from yatt_mm.control.skipped_steps import SkippedSteps
from yatt_mm.control.step_records import StepRecords
from yatt_mm.control.step_report import StepReport
from yatt_mm.control.updates import Updates
from yatt_mm.control.worker_calls import WorkerCalls
from yatt_mm.generation.batch_filler import BatchFiller
from yatt_mm.generation.metrics import (
    add_advantages,
    add_groups,
    add_moves,
    add_sampling,
)
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.placement.coordinator import PhaseEntry
from yatt_mm.placement.coordinator_client import CoordinatorClient
from yatt_mm.protocol.control import RunStart, ScoredGroup, Team
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.published import Published
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.training.step_plan import UpdatePlan


class Controller:
    """One controller: its methods are the calls of the training loop, and it keeps what they share."""

    def __init__(self, *, index: int, config: Config, team: Team, start: RunStart) -> None:
        self.index = index
        self.config = config
        self.step = start.step
        self._start = start
        self._team = team
        self._client = RunClient(team.dataplane_uri, team.nodes, timeout_s=config.dataplane.timeout_s)
        self._prompts = PromptSource(self._client, config, team.recipes, start, controller=index)
        deadline_s = config.controllers.deadline_s
        self._coordinator = CoordinatorClient(team.coordinator, controller=index, deadline_s=deadline_s)
        self._rendezvous = RendezvousClient(
            team.rendezvous,
            controller=index,
            restart_count=team.restart_count,
            step=start.step,
            deadline_s=deadline_s,
            progress=team.progress,
        )
        self._workers = WorkerCalls(index, config, team, self._rendezvous, step=start.step)
        self._meter = StepMeter()
        keeper = team.keeper if config.rollouts.keep != "none" else None
        self._kept = KeptRollouts(keeper, self._client, config, restart_count=team.restart_count)
        self._best = BestModel(config.eval.keep_best, start.best)
        self._kl = KlCoefficient(config.algorithm.kl.settings(), start.kl_coef)
        self._report = StepReport(
            team,
            self._client,
            self._rendezvous,
            self._coordinator,
            self._workers,
            self._kept,
            self._meter,
            self._best,
            self._kl,
            controller=index,
        )
        self._filler = BatchFiller(
            controller=index,
            config=config,
            team=team,
            rendezvous=self._rendezvous,
            coordinator=self._coordinator,
            client=self._client,
            prompts=self._prompts,
            meter=self._meter,
            enter_phase=self.phase,
            tell=self._report.tell,
        )
        self._failures = FailureWatch(self._rendezvous, config.reward, start.rewards, before_end=self._kept.finish)
        self._records = StepRecords(self._rendezvous, self._kept, self._meter, is_restart=team.restart_count > 0)
        self._begun = BegunStepSaver(
            config, team, start, self._prompts, self._rendezvous, self._meter, controller=index
        )
        self._updates = Updates(config, team, self._rendezvous, self._workers, self._meter)
        self._skipped = SkippedSteps(config, config.skipped_dir.absolute(), self._rendezvous, controller=index)
        self._of_filling: StepMeter | None = None
        """The metrics of the filling of the present step; None before its batch is full."""
        self._has_wrong_rewards = False
        """True if a reward of the present step is out of its range."""
        self._evaluation = Evaluation(
            config,
            start.eval_sets,
            self._prompts,
            self._filler,
            self._rendezvous,
            self._kept,
            self._meter,
            self.phase,
            self._report.tell,
        )
        self._saver = CheckpointSaver(
            config,
            team,
            self._rendezvous,
            self._workers,
            self._meter,
            self._best,
            self._kl,
            self.phase,
            controller=index,
        )

    # ------------------------------------------------------------------ the loop's frame

    @property
    def is_begun(self) -> bool:
        """True if the model of the start was measured before a fault, or in the run that goes on."""
        return self._start.is_begun

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps. Each ends with its record handed over and, when due, a checkpoint."""
        if not self.is_begun:
            self.begin()
        elif self._team.restart_count and self._start.ranks_at <= self.step:
            self._renew_reference()  # a fault may have come before both, and no later update
            self._save_what_is_due()
        needs_one = self.config.checkpoint.at == "phase" and self._start.ranks_at <= self.step
        if needs_one and not self._saver.has_saved_until(self.step):
            self.checkpoint()  # begun steps need one before them
        while self.step < self.config.train.steps:
            self.step += 1
            self._rendezvous.step = self._workers.step = self.step
            self._rendezvous.phase = "prompts"
            self._report.begin_step()
            self._rendezvous.may_stop = True
            yield self.step
            is_last = self.step == self.config.train.steps
            if is_last or _is_due(self.step, self.config.eval.every):
                self.evaluate()
            self._report.hand_over()  # before the checkpoint: a run that resumes from it finds the step's record
            self._finish_save()  # of an earlier step
            self._renew_reference()
            self._save_what_is_due()

    def begin(self) -> None:
        """Measure the model as it is, before the first step."""
        self._tell_flaws()
        self.evaluate()
        self._report.hand_over()

    @contextmanager
    def phase(self, phase: Phase, *, clock: str | None = None, group_size: int | None = None) -> Iterator[PhaseEntry]:
        """Bring every role into its state of `phase` for a block. The block ends when all controllers have finished it.
        Its time is added to `time/<clock>_s`. `group_size`: see `EnterPhase`."""
        self._rendezvous.phase = name = clock or str(phase)
        started_s = time.time()
        with self._meter.timed(f"time/{name}_s"):
            is_measured = name != "eval"
            mine = None
            if self.index == 0:
                rooms = None if group_size is None else self.config.requests_per_engine(group_size)
                mine = self._coordinator.enter(
                    phase, step=self.step, is_measured=is_measured, requests_per_engine=rooms
                )
                add_moves(self._meter, mine.moved)
            entered = self._rendezvous.gather(mine)[0]
            assert entered is not None
            yield entered
            self._rendezvous.gather(None)
        self._report.phases.append((name, started_s, time.time()))

    # ------------------------------------------------------------------ the calls of the loop

    def generate(self) -> list[ScoredGroup]:
        """Return this controller's share of a full batch: prompts drawn, `group_size` responses sampled for each, and
        their rewards.

        With `sampling.replace_groups` further prompts follow until enough groups have signal.
        """
        if (share := self._records.take(self.step)) is not None:
            self._rendezvous.may_stop = False  # the ranks may have been trained on them
            return self._generated_before(share)
        if (share := self._begun.take(self.step)) is not None:
            share = replace(share, groups=tuple(map(bare, self._with_advantages(share.groups))))
            self._records.put(self.step, share)
            return self._generated_before(share)
        works, so_far = self._begun.take_part(self.step)
        self._meter.add(so_far)
        self._filler.go_on_with(works)
        filled = self._filler.fill()
        self._of_filling = self._meter.copy()
        filled = replace(filled, kept=self._with_advantages(filled.kept))
        add_advantages(self._meter, filled.kept)
        least = self.config.algorithm.min_reward_range
        add_groups(self._meter, filled.judged, step=self.step, min_reward_range=least)
        self._has_wrong_rewards = self._skipped.has_wrong_rewards(filled.judged)
        self._kept.keep_batch(filled, step=self.step, all_groups=self._has_wrong_rewards)
        self._failures.check(filled.judged, among=f"step {self.step}", tells=self.index == 0)
        if self.index == 0:
            add_sampling(self._meter, filled.outcome, filled.num_rounds)
        share = StepShare(
            groups=tuple(map(bare, filled.kept)),
            has_wrong_rewards=self._has_wrong_rewards,
            meter=self._meter.copy(),
        )
        if self.config.checkpoint.at == "phase":
            self._begun.save(self.step, share)
        self._records.put(self.step, share)
        return filled.kept

    def plan(self, groups: Sequence[ScoredGroup]) -> list[UpdatePlan]:
        """Return for each of my replicas what its ranks train, balanced over all controllers' samples."""
        return self._updates.plan(groups)

    def update(self, plans: Sequence[UpdatePlan], groups: Sequence[ScoredGroup]) -> None:
        """Train the policy on the ranks of this controller's replicas."""
        self._filler.forget_begun()
        self._of_filling = None
        if self._has_wrong_rewards:
            why = f"a reward is out of reward.range, which is {list(self.config.reward.range or ())}"
            self._meter.add_max("train/num_skipped", self.config.train.num_minibatches)
            self._updates.pass_over(self.step)
        else:
            num_skipped = self._updates.train(self.step, plans, meanwhile=self._prefetch)
            why = "its loss or gradient was not finite" if num_skipped else ""
        self._skipped.note(self.step, groups, why=why)

    def publish(self) -> None:
        """Give the engines the trained weights: ranks make them readable on this host, and engines read them."""
        self._publish(self.step)

    def evaluate(self) -> None:
        """Measure the policy on the held-out sets."""
        groups = self._evaluation.run(self.step)
        self._failures.check(groups, among=f"the evaluation at step {self.step}", tells=self.index == 0)

    def checkpoint(self) -> None:
        """Save the run, so that it can continue from exactly here."""
        self._saver.save(self.step)
        if self.config.sampling.tail == "continue":
            self._begun.save_part(self.step + 1, self._filler.begun(), StepMeter(), self._rendezvous.sampling_state)
        if self.step == self.config.train.steps or not self.config.checkpoint.asynchronous:
            self._finish_save()

    def give_up_step(self) -> int:
        """Save the run as it was before the present step, unless that is saved already, and the groups of the step that
        are there. Return the step before."""
        begun, so_far = self._filler.begun(), (self._of_filling or self._meter).copy()
        self.step -= 1
        self._workers.step = self.step
        self._rendezvous.give_up_step()
        self._saver.finish()
        if not self._saver.has_saved(self.step):
            self._saver.save(self.step)
            self._saver.finish()
        self._begun.save_part(self.step + 1, begun, so_far, self._rendezvous.begun_state)
        return self.step

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        self._export(self._team.export_dir)
        if self.index == 0:
            self._report.tell_usage()

    def resume(self) -> None:
        """Bring the training ranks to the step from which the run goes on, and give the engines its weights. The ranks
        load the checkpoint, and are trained again on what came after it."""
        start = self._start
        if start.checkpoint is None and not self._team.restart_count:
            return
        with self.phase(Phase.TRAIN, clock="resume"):
            if start.checkpoint is not None:
                self._workers.on_my_ranks("load", start.checkpoint, start.ranks_at)
            for step in range(start.ranks_at + 1, start.step + 1):
                self._updates.train_again(step)
        with self.phase(Phase.PUBLISH):
            self._publish(max(start.step, start.ranks_at))
        self._meter.take()
        self._tell_flaws()

    def abort(self, reason: str) -> None:
        """Tell the other controllers that this one has failed."""
        self._rendezvous.abort(reason)

    # ------------------------------------------------------------------ helpers

    def _publish(self, version: int) -> None:
        path = f"{self._team.weights_dir}/policy"
        mine = [part for part in self._workers.on_my_ranks("publish", path, version) if part]
        published = Published.of(version, path, [part for parts in self._rendezvous.gather(mine) for part in parts])
        self._workers.on_engines(self._workers.my_engines, "update_weights", published)
        self._rendezvous.gather(None)  # no controller publishes again before every engine has taken this version

    def _with_advantages(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return this controller's groups of a full batch with their advantages."""
        settings, found = self.config.algorithm.settings(), None
        if settings.kl.where == "reward":
            with self.phase(Phase.TRAIN, clock="reference"):
                found = self._updates.divergences(self.step, groups)
        return with_advantages(
            groups,
            settings,
            self._rendezvous,
            max_tokens=self.config.rollout.max_tokens,
            divergences=found,
            kl_coef=self._kl.value,
        )

    def _generated_before(self, share: StepShare) -> list[ScoredGroup]:
        """Return the groups of a step that was broken off after they were generated."""
        self._meter.begin_with(share.meter)
        self._has_wrong_rewards = share.has_wrong_rewards
        self._kept.keep_again(share.groups, step=self.step, all_groups=share.has_wrong_rewards)
        return list(share.groups)

    def _save_what_is_due(self) -> None:
        """Save the run after its last step, after its best one so far, and when it is time; and export the best one."""
        is_best = self.step > 0 and self._best.step == self.step
        is_due = is_best or self._is_checkpoint_due() or self.step == self.config.train.steps
        if is_due and not (self._team.restart_count and self._saver.has_saved(self.step)):
            self.checkpoint()
        if is_best:
            self._export(self._team.best_dir)

    def _renew_reference(self) -> None:
        """Write the policy that becomes the reference, if it is time, and remove those that no checkpoint needs."""
        references = self.config.references
        if references is None or not references.is_due(self.step):
            return
        folder = references.folder(self.step)
        self._export(str(folder))
        if self.index == 0:
            with writing(folder):
                write_manifest(folder)  # before the checkpoint, which is worth nothing without it
            references.prune(min(self._team.checkpoints.steps(), default=0))

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written. What a restart would need without it is released."""
        if (saved := self._saver.finish()) is not None:
            self._records.forget(saved, tells=self.index == 0)

    def _is_checkpoint_due(self) -> bool:
        """Return True after every `checkpoint.every` steps, and after the first one of a run whose time is limited,
        which must know how long saving takes."""
        is_first = self.config.train.max_time is not None and self.step == self._start.step + 1
        return is_first or _is_due(self.step, self.config.checkpoint.every)

    def _export(self, folder: str) -> None:
        with self.phase(Phase.PUBLISH, clock="export"):
            self._workers.on_my_ranks("save_hf", folder, at_most_s=self.config.faults.export_deadline_s)

    def _prefetch(self) -> None:
        """Let the node make the next step's patches while the ranks compute."""
        if self.step < self.config.train.steps:
            coming = self._rendezvous.peek(self.config.train.prompts_per_step)
            self._prompts.prefetch(coming[self.index :: self.config.controllers.num])

    def _tell_flaws(self) -> None:
        self._report.tell(self._start.flaws if self.index == 0 else ())


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
