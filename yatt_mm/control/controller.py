"""One of several equal controllers: the verbs of the training loop, on this controller's share of the prompts.

Consumes: samples and refs from the data plane, drawn through the rendezvous.
Produces: calls to engines, reward workers and training ranks; a share of each step's metrics.
Waits for: workers and the other controllers, always with a deadline.
It holds refs, lengths and rewards. No pixel, token or weight passes through it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dataplane.client import Client
from yatt_mm.algorithms.advantages import group_advantages, has_signal
from yatt_mm.config import Config
from yatt_mm.control.calls import wait_all
from yatt_mm.control.generation import Generation
from yatt_mm.control.judging import Judging
from yatt_mm.control.messages import Prompt, RunStart, ScoredGroup, Team
from yatt_mm.control.metrics import (
    Meter,
    add_groups,
    add_judges,
    add_moves,
    add_sampling,
    add_update,
    merge,
    resident_bytes,
)
from yatt_mm.control.prompts import PromptSource
from yatt_mm.control.rendezvous import Key
from yatt_mm.errors import DataError
from yatt_mm.placement import Phase, Role, State
from yatt_mm.rollout.messages import Sampling
from yatt_mm.training.microbatches import Limits
from yatt_mm.training.plan import PlannedGroup, UpdatePlan, plan_step
from yatt_mm.weights.published import Published


class Controller:
    """State of one controller between the verbs."""

    def __init__(self, *, index: int, config: Config, team: Team, start: RunStart) -> None:
        self.index = index
        self.config = config
        self.step = start.step
        self._start = start
        self._team = team
        self._client = Client(team.dataplane_uri, timeout_s=config.dataplane.timeout_s)
        self._prompts = PromptSource(self._client, config, team.recipe, start, controller=index)
        self._generation = Generation(index, config, team, self._client)
        self._judging = Judging(index, config, team)
        self._states = {Role.ROLLOUT: State.AWAKE, Role.TRAIN: State.AWAKE}
        if team.judges:
            self._states[Role.GENRM] = State.ASLEEP
        self._meter = Meter()
        self._saving: dict[str, Any] | None = None
        self._sequence = 0
        self._phase = "start"
        self._step_started = time.perf_counter()
        self._my_engines = [e for e in range(len(team.engines)) if e % config.controllers.num == index]
        self._my_replicas = [d for d in range(team.num_replicas) if d % config.controllers.num == index]

    # ------------------------------------------------------------------ the loop's frame

    def steps(self) -> Iterator[int]:
        """The steps that are left; each ends with its record handed over and, when due, a checkpoint."""
        if self._start.checkpoint is None:
            self._tell(self._start.flaws if self.index == 0 else ())
            self.evaluate()
            self._report()
        while self.step < self.config.train.steps:
            self.step += 1
            self._step_started = time.perf_counter()
            yield self.step
            is_last = self.step == self.config.train.steps
            if is_last or _is_due(self.step, self.config.eval.every):
                self.evaluate()
            self._report()  # before the checkpoint: what resumes after it finds the step's record
            self.finish_checkpoint()  # of an earlier step: written while this one ran
            if is_last or _is_due(self.step, self.config.checkpoint.every):
                self.checkpoint()

    @contextmanager
    def phase(self, phase: Phase, *, clock: str | None = None) -> Iterator[None]:
        """Every role in the states of `phase`; ends when all controllers are through. Adds to `time/<clock>_s`."""
        self._phase = clock or str(phase)
        with self._meter.timed(f"time/{self._phase}_s"):
            self._enter(phase)
            yield
            self._meet(None)

    # ------------------------------------------------------------------ the loop's verbs

    def generate(self) -> list[ScoredGroup]:
        """This controller's share of a full batch: prompts drawn, answered `group_size` times each, and scored.

        With `sampling.replace_groups` further rounds follow until enough groups have signal.
        """
        groups: list[ScoredGroup] = []
        for num_rounds in itertools.count(1):
            prompts = self._next_prompts()
            with self.phase(Phase.ROLLOUT):
                answered = self._answer(prompts, num_rounds)
            if self._team.judges:
                with self.phase(Phase.JUDGE, clock="genrm"):
                    answered = self._judge(answered, num_rounds)
            landed = [(group.prompt.slot.position, has_signal(group.rewards)) for group in answered]
            outcome = self._call_rendezvous("finish_round", landed)
            groups += answered
            if outcome.is_full:
                break
        add_groups(self._meter, groups, step=self.step)
        if self.index == 0:
            add_sampling(self._meter, outcome, num_rounds)
        kept = set(outcome.kept)
        self._client.release([group.group.ref for group in groups if group.prompt.slot.position not in kept])
        return [group for group in groups if group.prompt.slot.position in kept]

    def plan(self, groups: Sequence[ScoredGroup]) -> list[UpdatePlan]:
        """[my replica] what its ranks train, balanced over all controllers' samples."""
        train, normalize_std = self.config.train, self.config.algorithm.normalize_std
        mine = [
            PlannedGroup(
                position=group.prompt.slot.position,
                group=group.group,
                advantages=tuple(group_advantages(group.rewards, normalize_std=normalize_std)),
            )
            for group in groups
        ]
        everyone = [group for part in self._meet(mine) for group in part]
        parallel = self._team.parallel
        plan = plan_step(
            everyone,
            operations=self._team.operations,
            num_replicas=self._team.num_replicas,
            num_minibatches=train.num_minibatches,
            limits=Limits(
                max_tokens=train.max_tokens_per_microbatch,
                max_patches=train.max_patches_per_microbatch,
                multiple_of=parallel.pp if parallel.vpp > 1 else 1,
            ),
            replicas=self._my_replicas,
        )
        self._meter.add_max("train/imbalance", plan.imbalance)
        self._meter.add_max("train/num_microbatches", plan.num_microbatches)
        return list(plan.replicas)

    def update(self, plans: Sequence[UpdatePlan], groups: Sequence[ScoredGroup]) -> None:
        """Train my replicas' ranks; afterwards the step's rollouts may go."""
        calls = [
            (name, rank.update.remote(plan))
            for replica, plan in zip(self._my_replicas, plans)
            for name, rank in self._team.ranks_of(replica)
        ]
        self._prefetch()
        for report in self._wait(calls, "update"):
            add_update(self._meter, report)
        self._meet(None)
        self._client.release([group.group.ref for group in groups])

    def publish(self) -> None:
        """Give the engines the trained weights: ranks make them readable on this host, engines read them."""
        path = f"{self._team.weights_dir}/policy"
        mine = [segment for segment in self._on_my_ranks("publish", path, self.step) if segment]
        devices = tuple(segment for segments in self._meet(mine) for segment in segments)
        published = Published(version=self.step, path=path, devices=devices)
        self._on_engines(self._my_engines, "update_weights", published)
        self._meet(None)  # nobody publishes again before every engine has taken this version

    def evaluate(self) -> None:
        """Mean reward of greedy answers to the held-out prompts."""
        with self.phase(Phase.ROLLOUT, clock="eval"):
            prompts, notices = self._prompts.load_eval()
            self._tell(notices)
            if not sum(self._meet(len(prompts))):
                raise DataError("every held-out sample is quarantined (quarantine.jsonl says why); check data.eval")
            sampling = Sampling(max_tokens=self.config.rollout.max_tokens, greedy=True)
            groups = self._generation.run(prompts, sampling, num_samples=1, phase=f"evaluation {self.step}")
            self._client.release([group.group.ref for group in groups])
        self._meter.add_mean("eval/accuracy", sum(group.rewards[0] for group in groups), len(groups))
        self._meter.add_sum("eval/num_samples", len(groups))

    def checkpoint(self) -> None:
        """Save the run so that it can go on from exactly here."""
        with self.phase(Phase.TRAIN, clock="checkpoint"):
            directory = self._team.checkpoints.begin(self.step)
            self._on_my_ranks("save", str(directory), self.config.checkpoint.asynchronous)
            self._saving = {"step": self.step}
            if self.index == 0:
                self._saving |= self._call("sampling_state")
        if self.step == self.config.train.steps or not self.config.checkpoint.asynchronous:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Make the checkpoint that ranks are writing, if any, count."""
        if self._saving is None:
            return
        state, self._saving = self._saving, None
        self._phase = "checkpoint"
        with self._meter.timed("time/checkpoint_s"):
            self._on_my_ranks("finish_save")
            self._meet(None)
            if self.index == 0:
                self._team.checkpoints.commit(state["step"], state)
            self._meet(None)

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        with self.phase(Phase.PUBLISH, clock="export"):
            self._on_my_ranks("save_hf", self._team.export_dir)

    def resume(self) -> None:
        """Load the checkpoint that the run starts from, and give the engines its weights."""
        if self._start.checkpoint is None:
            return
        self._phase = "resume"
        self._on_my_ranks("load", self._start.checkpoint)
        with self.phase(Phase.PUBLISH):
            self.publish()
        self._meter = Meter()

    def abort(self, reason: str) -> None:
        """Tell the other controllers that this one cannot go on."""
        self._call("abort", self.index, reason)

    # ------------------------------------------------------------------ helpers

    def _next_prompts(self) -> list[Prompt]:
        """This controller's share of a round's prompts, their patches made; unreadable media are replaced."""
        self._phase = "prompts"
        prompts: list[Prompt] = []
        bad: list[int] = []
        while True:
            share = self._call_rendezvous("draw", bad)
            with self._meter.timed("time/prompts_s"):
                found, notices = self._prompts.load(share)
            prompts += found
            bad = [notice["index"] for notice in notices]
            self._tell(notices)
            if not any(self._meet(len(bad))):
                return prompts

    def _answer(self, prompts: Sequence[Prompt], num_rounds: int) -> list[ScoredGroup]:
        rollout = self.config.rollout
        return self._generation.run(
            prompts,
            Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature),
            num_samples=rollout.group_size,
            phase=self._round_name(num_rounds),
        )

    def _judge(self, groups: Sequence[ScoredGroup], num_rounds: int) -> list[ScoredGroup]:
        weight = self.config.reward.weight
        self._meter.add_mean(
            "reward/function_mean", sum(sum(g.rewards) for g in groups), sum(len(g.rewards) for g in groups)
        )
        return self._judging.run(
            [dataclasses.replace(group, rewards=tuple(weight * r for r in group.rewards)) for group in groups],
            phase=self._round_name(num_rounds),
            meter=self._meter,
            on_progress=lambda: self._team.rendezvous.seen.remote(self.index),
        )

    def _round_name(self, num_rounds: int) -> str:
        return f"step {self.step}" if num_rounds == 1 else f"step {self.step}, round {num_rounds}"

    def _enter(self, phase: Phase) -> None:
        for role, state in self._team.placement.transitions(self._states, phase):
            if role is Role.TRAIN:
                add_moves(self._meter, self._on_my_ranks("set_state", state))
            elif role is Role.ROLLOUT:
                self._on_engines(self._my_engines, "set_state", state)
            else:
                self._on_my_judges("set_state", state)
            self._states[role] = state
            self._meet(None)

    def _prefetch(self) -> None:
        """Let the node make the next step's patches while the ranks compute."""
        if self.step < self.config.train.steps:
            coming = self._call("peek", self.config.train.prompts_per_step)
            self._prompts.prefetch(coming[self.index :: self.config.controllers.num])

    def _on_my_ranks(self, method: str, *arguments: object) -> list[Any]:
        calls = [
            (name, getattr(rank, method).remote(*arguments))
            for replica in self._my_replicas
            for name, rank in self._team.ranks_of(replica)
        ]
        return self._wait(calls, method)

    def _on_engines(self, engines: Sequence[int], method: str, *arguments: object) -> list[Any]:
        calls = [
            (self._team.engine_name(e), getattr(self._team.engines[e], method).remote(*arguments)) for e in engines
        ]
        return self._wait(calls, " ".join([method, *map(str, arguments)]))

    def _on_my_judges(self, method: str, *arguments: object) -> list[Any]:
        """Engines of the judges are divided among the controllers like the policy's."""
        named = [
            (self._team.judge_name(judge, e), engine)
            for judge, engines in self._team.judges.items()
            for e, engine in enumerate(engines)
        ]
        mine = named[self.index :: self.config.controllers.num]
        calls = [(name, getattr(engine, method).remote(*arguments)) for name, engine in mine]
        return self._wait(calls, " ".join([method, *map(str, arguments)]))

    def _wait(self, calls: list[tuple[str, Any]], what: str) -> list[Any]:
        return wait_all(calls, what=f"{what} of step {self.step}", deadline_s=self.config.controllers.deadline_s)

    def _meet(self, value: Any) -> list[Any]:
        return self._call_rendezvous("gather", value)

    def _call_rendezvous(self, method: str, *values: Any) -> Any:
        key = Key(step=self.step, phase=self._phase, generation=self._team.generation, sequence=self._sequence)
        self._sequence += 1
        return self._call(method, key, self.index, *values)

    def _call(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._team.rendezvous, method).remote(*arguments)
        deadline_s = self.config.controllers.deadline_s * 1.5  # it has a deadline of its own, and says more
        return wait_all([("the rendezvous", call)], what=method, deadline_s=deadline_s)[0]

    def _tell(self, notices: Sequence[Mapping[str, Any]]) -> None:
        for notice in notices:
            self._meter.add_sum("data/num_quarantined", 1)
            self._call("put_record", {"kind": "quarantine", "step": self.step, **notice})

    def _report(self) -> None:
        """Merge all controllers' numbers into the step's record; controller 0 hands it over."""
        self._phase = "report"
        self._meter.add_max("controller/rss_bytes_max", resident_bytes())
        if self._team.judges:
            add_judges(self._meter, self._on_my_judges("metrics"))
        self._meter.add_max("time/step_s", time.perf_counter() - self._step_started)
        meters = self._meet(self._meter)
        self._meter = Meter()
        if self.index:
            return
        record = merge(meters)
        stat = self._client.stat()
        for name in (
            "num_media",
            "num_processed",
            "num_recomputed",
            "num_evicted",
            "used_bytes",
            "processed_bytes",
        ):
            record[f"dataplane/{name}"] = stat[name]
        engine_totals = self._on_engines(range(len(self._team.engines)), "metrics")
        record["rollout/ipc_bytes"] = sum(totals["ipc_bytes"] for totals in engine_totals)
        self._call("put_record", {"kind": "step", "step": self.step, **record})


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
