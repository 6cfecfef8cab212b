"""How a controller fills its share of a step's batch: in a stream, in turns with judges, or in rounds of all
prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.client.client import Client
from yatt_mm.algorithms.advantages import has_signal
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.config.run_config import Config
from yatt_mm.generation.actor_calls import ActorCalls
from yatt_mm.generation.group_work import GroupWork, PhaseContext
from yatt_mm.generation.metrics import StepMeter
from yatt_mm.generation.pending_calls import PendingCalls
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.generation.rounds import answer, judge, scored
from yatt_mm.generation.streaming import Streaming
from yatt_mm.placement.coordinator import PhaseEntry
from yatt_mm.protocol.control import Prompt, ScoredGroup, Slot, Team
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.rollout import SamplingSettings


class EnterPhase(Protocol):
    """Brings every role into its state of a phase, for a block."""

    def __call__(self, phase: Phase, *, clock: str | None = None) -> AbstractContextManager[PhaseEntry]:
        """Enter a phase on all devices for a `with` block. `clock` is the metric to which the block's time is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch:
    """A full batch, from one controller's view."""

    kept: list[ScoredGroup]
    """This controller's groups of the batch, in the run's order."""
    judged: list[ScoredGroup]
    """All groups of this controller that were judged."""
    outcome: RoundOutcome
    num_rounds: int


class BatchFiller:
    """Fills one controller's share of a step's batch.

    Consumes: prompts that the rendezvous deals out. Produces: scored groups.
    """

    def __init__(
        self,
        *,
        controller: int,
        config: Config,
        team: Team,
        calls: ActorCalls,
        client: Client,
        prompts: PromptSource,
        meter: StepMeter,
        enter_phase: EnterPhase,
        tell: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> None:
        """`tell` hands over notices of samples that were skipped."""
        self._controller = controller
        self._config = config
        self._team = team
        self._with = calls
        self._client = client
        self._prompts = prompts
        self._meter = meter
        self._enter_phase = enter_phase
        self._tell = tell
        self._carried: dict[int, GroupWork] = {}
        """[position] the groups that the last stream cut off and the next one continues."""

    def fill(self) -> FilledBatch:
        """Return this controller's share of a full batch."""
        if self._config.rollout.deterministic:
            return self._in_rounds(self._all_at_once)
        return self._in_rounds(self._in_turn) if self._config.judges_in_turn else self._in_a_stream()

    def context(self, entered: PhaseEntry, name: str) -> PhaseContext:
        """Return the context for the stages of a phase; `name` of the phase is unique in the run."""
        pending = PendingCalls(
            deadline_s=self._config.controllers.deadline_s,
            on_progress=lambda: self._team.rendezvous.seen.remote(self._controller),
        )
        return PhaseContext(
            controller=self._controller,
            config=self._config,
            team=self._team,
            client=self._client,
            pending=pending,
            name=name,
            number=entered.number,
            awake=entered.awake,
        )

    def _in_a_stream(self) -> FilledBatch:
        """Fill the batch as a stream: groups go from stage to stage, each at its own speed."""
        with self._enter_phase(self._phase, clock="rollout") as entered:
            slots = self._with.meet_for("open_stream")
            context = self.context(entered, f"step {self._with.step}")
            stream = Streaming(context, self._sampling, self._load, self._carried, judging_for=self._meter)
            kept, outcome = stream.run(slots)
        self._tell(stream.notices)
        return FilledBatch(kept=scored(kept), judged=stream.landed, outcome=outcome, num_rounds=1)

    def _in_rounds(self, take_round: Callable[[str], list[GroupWork]]) -> FilledBatch:
        """Fill the batch in rounds until it is full: sample all responses of a round, then judge them all."""
        judged: list[ScoredGroup] = []
        for num_rounds in itertools.count(1):
            name = f"step {self._with.step}" if num_rounds == 1 else f"step {self._with.step}, round {num_rounds}"
            landed = scored(take_round(name))
            judged += landed
            signals = [(group.prompt.slot.position, has_signal(group.rewards)) for group in landed]
            outcome: RoundOutcome = self._with.meet_for("finish_round", signals)
            if outcome.is_full:
                break
        positions = set(outcome.kept)
        self._client.release([group.group.ref for group in judged if group.prompt.slot.position not in positions])
        kept = [group for group in judged if group.prompt.slot.position in positions]
        return FilledBatch(kept=kept, judged=judged, outcome=outcome, num_rounds=num_rounds)

    def _in_turn(self, name: str) -> list[GroupWork]:
        """Return a round's groups: a stream samples responses until there are enough groups, then these are judged."""
        with self._enter_phase(Phase.ROLLOUT, clock="rollout") as entered:
            slots = self._with.meet_for("open_stream")
            stream = Streaming(self.context(entered, name), self._sampling, self._load, self._carried)
            works, _ = stream.run(slots)
        self._tell(stream.notices)
        return self._judged(works, name)

    def _all_at_once(self, name: str) -> list[GroupWork]:
        """Return a round's groups: the responses to all prompts are sampled first, then all groups are judged."""
        prompts, num_samples = self._next_prompts(), self._config.rollout.group_size
        with self._enter_phase(self._phase, clock="rollout") as entered:
            works = answer(self.context(entered, name), prompts, self._sampling, num_samples=num_samples)
            if self._team.judges and self._config.is_partial:
                works = judge(self.context(entered, name), works, self._meter)
        return self._judged(works, name) if self._config.judges_in_turn else works

    def _judged(self, works: Sequence[GroupWork], name: str) -> list[GroupWork]:
        """Return the groups with their judges' scores. All devices judge during this call."""
        with self._enter_phase(Phase.JUDGE, clock="genrm") as entered:
            return judge(self.context(entered, name), works, self._meter)

    def _next_prompts(self) -> list[Prompt]:
        """Return this controller's share of a round's prompts, with their patches made; media that cannot be decoded
        are replaced."""
        self._with.phase = "prompts"
        prompts: list[Prompt] = []
        bad: list[int] = []
        while True:
            share = self._with.meet_for("draw", bad)
            found, notices = self._load(share)
            prompts += found
            bad = [notice["index"] for notice in notices]
            self._tell(notices)
            if not any(self._with.meet(len(bad))):
                return prompts

    def _load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return prompts with their patches made, and notices of those whose media cannot be decoded."""
        with self._meter.timed("time/prompts_s"):
            return self._prompts.load(slots)

    @property
    def _phase(self) -> Phase:
        return Phase.GENERATION if self._config.is_partial else Phase.ROLLOUT

    @property
    def _sampling(self) -> SamplingSettings:
        return SamplingSettings(
            max_tokens=self._config.rollout.max_tokens, temperature=self._config.rollout.temperature
        )
