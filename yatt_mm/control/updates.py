"""One controller's part in the updates of the weights: the plan, and the calls to its training ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from yatt_mm.algorithms.token_weights import Weighting
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.config.run_config import Config
from yatt_mm.control.worker_calls import WorkerCalls
from yatt_mm.generation.metrics import add_update
from yatt_mm.protocol.control import ScoredGroup, Team
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.training.microbatches import Limits
from yatt_mm.training.step_plan import PlannedGroup, StepPlan, UpdatePlan, plan_step


class Updates:
    """Plans and makes the updates. Every controller calls its methods at the same moments."""

    def __init__(
        self, config: Config, team: Team, rendezvous: RendezvousClient, workers: WorkerCalls, meter: StepMeter
    ) -> None:
        self._config = config
        self._team = team
        self._rendezvous = rendezvous
        self._workers = workers
        self._meter = meter

    def plan(self, groups: Sequence[ScoredGroup]) -> list[UpdatePlan]:
        """Return for each of my replicas what its ranks train, balanced over all controllers' samples."""
        plan = self._plan(groups)
        self._rendezvous.may_stop = False  # from here on the step is finished
        self._meter.add_max("train/imbalance", plan.imbalance)
        self._meter.add_max("train/num_microbatches", plan.num_microbatches)
        return list(plan.replicas)

    def divergences(self, step: int, groups: Sequence[ScoredGroup]) -> dict[int, list[float]]:
        """Return [position] [G] the divergence of each of this controller's responses from the reference, summed up
        over its tokens. Ranks of all controllers measure them, before there are advantages."""
        unplanned = [replace(group, advantages=(0.0,) * len(group.rewards)) for group in groups]
        calls = [
            (name, rank.divergences.remote(plan, step))
            for replica, plan in zip(self._workers.my_replicas, self._plan(unplanned).replicas)
            for name, rank in self._team.ranks_of(replica)
        ]
        mine = self._workers.wait(calls, "divergences", at_most_s=self._config.faults.update_deadline_s)
        every = {
            (name, row): value
            for part in self._rendezvous.gather([one for of_rank in mine for one in of_rank])
            for name, row, value in part
        }
        found = {
            group.prompt.slot.position: [every[group.group.ref.name, row] for row in range(len(group.rewards))]
            for group in groups
        }
        num_tokens = sum(length for group in groups for length in group.group.lengths)
        self._meter.add_mean("train/kl", sum(map(sum, found.values())), num_tokens)
        return found

    def _plan(self, groups: Sequence[ScoredGroup]) -> StepPlan:
        train, algorithm = self._config.train, self._config.algorithm.settings()
        mine = [
            PlannedGroup(position=group.prompt.slot.position, group=group.group, advantages=group.advantages)
            for group in groups
        ]
        all_groups = [group for part in self._rendezvous.gather(mine) for group in part]
        parallel = self._team.parallel
        return plan_step(
            all_groups,
            operations=self._team.operations,
            num_replicas=self._team.num_replicas,
            num_minibatches=train.num_minibatches,
            weighting=Weighting(
                kind=algorithm.token_weights,
                max_tokens=self._config.rollout.max_tokens,
                drops_truncated=algorithm.overlong_filter,
            ),
            limits=Limits(
                max_tokens=train.max_tokens_per_microbatch,
                max_patches=train.max_patches_per_microbatch,
                multiple_of=parallel.pp if parallel.vpp > 1 else 1,
            ),
            replicas=self._workers.my_replicas,
        )

    def train(self, step: int, plans: Sequence[UpdatePlan], *, meanwhile: Callable[[], object]) -> int:
        """Train the policy on the ranks of this controller's replicas, and return how many updates were skipped on any
        rank. `meanwhile` is called while they compute."""
        num_skipped = 0
        calls = [
            (name, rank.update.remote(plan, step))
            for replica, plan in zip(self._workers.my_replicas, plans)
            for name, rank in self._team.ranks_of(replica)
        ]
        meanwhile()
        for report in self._workers.wait(calls, "update", at_most_s=self._config.faults.update_deadline_s):
            add_update(self._meter, report)
            num_skipped = report.num_skipped  # the same on all ranks
        return max(self._rendezvous.gather(num_skipped))  # a controller may have no rank

    def pass_over(self, step: int) -> None:
        """Leave a step out: the ranks keep their weights."""
        self._workers.on_my_ranks("pass_over", step)

    def train_again(self, step: int) -> None:
        """Train new ranks on a step that was finished before a fault."""
        share = self._rendezvous.share(step)
        assert share is not None, f"the journal lacks step {step}"
        if share.has_wrong_rewards:
            self.pass_over(step)
        else:
            self.train(step, self.plan(share.groups), meanwhile=lambda: None)
