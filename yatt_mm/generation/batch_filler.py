"""How a controller fills its share of a step's batch: in a stream, in turns with judges, or in rounds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from dataplane.client.client import Client
from dataplane.core.refs import Ref
from yatt_mm.algorithms.advantages import has_signal
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.common.errors import DataError, StopRequested
from yatt_mm.config.run_config import Config
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.phase_calls import open_calls
from yatt_mm.generation.phase_context import PhaseContext
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.generation.rounds import answer, judge
from yatt_mm.generation.streaming import Streaming
from yatt_mm.placement.coordinator import PhaseEntry
from yatt_mm.placement.coordinator_client import CoordinatorClient
from yatt_mm.protocol.control import Prompt, ScoredGroup, Slot, Team
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.rollout import SamplingSettings
from yatt_mm.protocol.step_meter import StepMeter

T = TypeVar("T")


class EnterPhase(Protocol):
    """Brings every role into the state that a phase needs, during a `with` block."""

    def __call__(
        self, phase: Phase, *, clock: str | None = None, group_size: int | None = None
    ) -> AbstractContextManager[PhaseEntry]:
        """Enter a phase on all devices for a `with` block. `clock` is the metric to which the block's time is added.
        `group_size`: the responses of a group, if they are not those of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch:
    """A full batch, from one controller's view."""

    kept: list[ScoredGroup]
    """This controller's groups of the batch, in the run's order."""
    judged: list[ScoredGroup]
    """All groups of this controller that were judged."""
    outcome: RoundOutcome
    num_rounds: int
    dropped: list[Ref]
    """The records of this controller's groups that are neither in the batch nor carried over. Release them."""


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
        rendezvous: RendezvousClient,
        coordinator: CoordinatorClient,
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
        self._rendezvous = rendezvous
        self._coordinator = coordinator
        self._client = client
        self._prompts = prompts
        self._meter = meter
        self._enter_phase = enter_phase
        self._tell = tell
        self._carried: dict[int, GroupWork] = {}
        """[position] the groups that the last stream cut off and the next one continues."""
        self._of_step: dict[int, GroupWork] = {}
        """[position] the groups that streams of the present step have begun, until they are dropped."""

    def go_on_with(self, works: Sequence[GroupWork]) -> None:
        """Take over groups of the present step that were begun before. The next stream goes on with those that the
        rendezvous deals to this controller."""
        self._carried |= {work.prompt.slot.position: work for work in works}

    def begun(self) -> list[GroupWork]:
        """Return the groups of the present step that have a record, finished or cut off, in the order of the run."""
        works = self._carried | self._of_step
        return [works[position] for position in sorted(works) if works[position].group is not None]

    def forget_begun(self) -> None:
        """Forget the groups of the present step, which cannot be given up any more."""
        self._of_step = {}

    def fill(self) -> FilledBatch:
        """Return this controller's share of a full batch.

        Raises:
            DataError: no sample that the step drew can be used.
            WorkerError: a worker or another controller failed or was late.
        """
        if self._config.rollout.deterministic:
            filled = self._in_rounds(self._all_at_once)
        else:
            filled = self._in_rounds(self._in_turn) if self._config.judges_in_turn else self._in_a_stream()
        if not filled.outcome.kept:
            num, why = filled.outcome.num_prompts_used, self._rendezvous.why_left_out()
            raise DataError(f"step {self._rendezvous.step} drew {num} prompts, and none of them can be used{why}")
        return filled

    def run(self, entered: PhaseEntry, name: str, work: Callable[[PhaseContext], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a coroutine that does the work of a phase; `name` of the phase is unique among these
        controllers.

        Raises:
            WorkerError: a worker or another controller failed or was late.
            StopRequested: the run was told to stop, and the step can be given up.
        """

        async def run() -> T:
            deadline_s = self._config.controllers.deadline_s
            async with open_calls(deadline_s=deadline_s, on_progress=self._rendezvous.seen) as calls:
                context = PhaseContext(
                    controller=self._controller,
                    config=self._config,
                    team=self._team,
                    client=self._client,
                    rendezvous=self._rendezvous,
                    coordinator=self._coordinator,
                    calls=calls,
                    name=f"{name} again ({restarts})" if (restarts := self._team.restart_count) else name,
                    number=entered.number,
                    awake=entered.awake,
                )
                return await self._unless_stopped(work(context))

        return asyncio.run(run())

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, or cancel it when the run is told to stop."""
        if not self._rendezvous.may_stop:
            return await work
        working, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._rendezvous.stop_asked())
        try:
            await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            stop.result()
            raise StopRequested("the run was told to stop")
        finally:
            stop.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _in_a_stream(self) -> FilledBatch:
        """Fill the batch as a stream: groups go from stage to stage, each at its own speed."""
        stream, kept, outcome = self._stream(self._phase, f"step {self._rendezvous.step}", judging_for=self._meter)
        return FilledBatch(
            kept=_scored(kept), judged=stream.landed, outcome=outcome, num_rounds=1, dropped=stream.dropped
        )

    def _in_rounds(self, take_round: Callable[[str], list[GroupWork]]) -> FilledBatch:
        """Fill the batch in rounds until it is full: sample all responses of a round, then judge them all."""
        judged: list[ScoredGroup] = []
        step = f"step {self._rendezvous.step}"
        for num_rounds in itertools.count(1):
            landed = _scored(take_round(step if num_rounds == 1 else f"{step}, round {num_rounds}"))
            judged += landed
            least = self._config.algorithm.min_reward_range
            signals = [(group.prompt.slot.position, has_signal(group.rewards, min_range=least)) for group in landed]
            outcome = self._rendezvous.finish_round(signals)
            if outcome.is_full:
                break
        positions = set(outcome.kept)
        kept = [group for group in judged if group.prompt.slot.position in positions]
        dropped = [group.group.ref for group in judged if group.prompt.slot.position not in positions]
        self._of_step = {position: work for position, work in self._of_step.items() if position in positions}
        return FilledBatch(kept=kept, judged=judged, outcome=outcome, num_rounds=num_rounds, dropped=dropped)

    def _in_turn(self, name: str) -> list[GroupWork]:
        """Return judged groups: engines sample a stream of prompts until there are enough groups, then the judges judge
        these."""
        stream, works, _ = self._stream(Phase.ROLLOUT, name)
        self._client.release(stream.dropped)
        self._judge_all(works, name)
        return works

    def _all_at_once(self, name: str) -> list[GroupWork]:
        """Return a round's groups: the responses to all prompts are sampled first, then all groups are judged."""
        prompts, num_samples = self._next_prompts(), self._config.rollout.group_size
        with self._enter_phase(self._phase, clock="rollout") as entered:
            works = self.run(entered, name, partial(answer, prompts, self._sampling, num_samples=num_samples))
            if self._team.judges and self._config.is_partial:
                self.run(entered, name, partial(judge, works, self._meter))
        if self._config.judges_in_turn:
            self._judge_all(works, name)
        return works

    def _stream(
        self, phase: Phase, name: str, *, judging_for: StepMeter | None = None
    ) -> tuple[Streaming, list[GroupWork], RoundOutcome]:
        """Run one stream of prompts, and return it with its kept groups and how it was filled."""
        with self._enter_phase(phase, clock="rollout") as entered:
            slots = self._rendezvous.open_stream()

            async def run(context: PhaseContext) -> tuple[Streaming, list[GroupWork], RoundOutcome]:
                stream = Streaming(context, self._sampling, self._load, self._carried, judging_for=judging_for)
                try:
                    kept, outcome = await stream.run(slots)
                finally:
                    self._of_step |= {work.prompt.slot.position: work for work in stream.works}
                return stream, kept, outcome

            stream, kept, outcome = self.run(entered, name, run)
        return stream, kept, outcome

    def _judge_all(self, works: Sequence[GroupWork], name: str) -> None:
        """Add the judges' scores to the rewards of the groups that have none. All devices judge during this call."""
        left = [work for work in works if not work.is_judged]
        with self._enter_phase(Phase.JUDGE, clock="genrm") as entered:
            self.run(entered, name, partial(judge, left, self._meter))

    def _next_prompts(self) -> list[Prompt]:
        """Return this controller's share of a round's prompts, with their patches made. Prompts with media that cannot
        be decoded are replaced."""
        self._rendezvous.phase = "prompts"
        prompts: list[Prompt] = []
        bad: list[int] = []
        while True:
            share = self._rendezvous.draw(bad)
            found, notices = self._load(share)
            prompts += found
            bad = [notice["position"] for notice in notices]
            if not any(self._rendezvous.gather(len(bad))):
                return prompts

    def _load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return prompts with their patches made, and notices of those that cannot be used, which are told at once."""
        with self._meter.timed("time/prompts_s"):
            prompts, notices = self._prompts.load(slots)
        self._tell(notices)
        return prompts, notices

    @property
    def _phase(self) -> Phase:
        return Phase.GENERATION if self._config.is_partial else Phase.ROLLOUT

    @property
    def _sampling(self) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            max_tokens=rollout.max_tokens, temperature=rollout.temperature, stop=tuple(rollout.stop)
        )


def _scored(works: Sequence[GroupWork]) -> list[ScoredGroup]:
    """Return, for each group, what training and metrics need of it."""
    return [work.scored() for work in works]
