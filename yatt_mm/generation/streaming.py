"""Generation phases as a stream: every group goes to the next stage at once, and further prompts come in.

Consumes: prompts as the rendezvous deals them out.
Produces: this controller's groups of the batch.
Waits for: its own calls, and the news that the batch is full. When the batch is full, groups in flight are cut off, and
dropped or carried over into the next step. They are cut off too when the stream is cancelled, because the run stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dataplane.core.refs import Ref
from yatt_mm.algorithms.advantages import has_signal
from yatt_mm.batching.dynamic_sampling import Tail
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.judge_stage import JudgeStage
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.reward_stage import RewardStage
from yatt_mm.generation.rollout_stage import RolloutStage
from yatt_mm.generation.tick_batch import TickBatch
from yatt_mm.protocol.control import Prompt, ScoredGroup, Slot
from yatt_mm.protocol.rollout import SamplingSettings
from yatt_mm.protocol.saved_groups import SavedGroup
from yatt_mm.protocol.step_meter import StepMeter

LoadPrompts = Callable[[Sequence[Slot]], tuple[list[Prompt], list[dict[str, Any]]]]


class Streaming:
    """One stream of one controller."""

    def __init__(
        self,
        context: PhaseContext,
        sampling: SamplingSettings,
        load_prompts: LoadPrompts,
        carried: dict[int, GroupWork],
        *,
        judging_for: StepMeter | None = None,
    ) -> None:
        """`carried`: the groups that the last stream cut off, by position; each is removed when it continues.

        `judging_for` collects the metrics of judges. Without it groups are finished when they have responses and
        rewards.
        """
        self.landed: list[ScoredGroup] = []
        """All groups that came to the end, kept or not."""
        self.dropped: list[Ref] = []
        """The records that nothing needs after the stream: those of groups that are neither kept nor carried over."""
        self._context = context
        self._load_prompts = load_prompts
        self._carried = carried
        self._works: dict[int, GroupWork] = {}
        self._ways: list[asyncio.Task[None]] = []
        self._outcome: RoundOutcome | None = None
        rule = context.config.sampling_rule()
        self._restarts = rule.tail is Tail.RESTART
        self._rewards = RewardStage(context)
        self._judges: JudgeStage | None = None
        if judging_for is not None and context.team.judges:
            self._judges = JudgeStage(context, judging_for, chunk_size=1)
        waits_for_single_groups = self._judges is not None or rule.over_dispatch > 1
        self._rollout = RolloutStage(
            context,
            sampling,
            num_samples=context.config.rollout.group_size,
            chunk_size=1 if waits_for_single_groups else CHUNK_SIZE,
        )
        self._news: TickBatch[None, tuple[int, bool | None, SavedGroup | None], None] = TickBatch(
            context.calls, self._tell
        )

    async def run(self, slots: Sequence[Slot]) -> tuple[list[GroupWork], RoundOutcome]:
        """Run the stream from this controller's first prompts to the full batch. Return (kept groups in the run's
        order, how it was filled).

        Raises:
            WorkerError: a worker or another controller failed or was late.
        """
        self._begin(slots)
        try:
            outcome = self._outcome = await self._until_full()
        except asyncio.CancelledError:
            await self._cut_off()
            raise
        await self._cut_off()
        return in_order(self._keep(outcome)), outcome

    @property
    def works(self) -> list[GroupWork]:
        """All groups that the stream has begun or continued."""
        return list(self._works.values())

    async def _cut_off(self) -> None:
        """End the groups in flight. They have the tokens that their engines return."""
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)

    async def _follow(self, work: GroupWork) -> None:
        """Take one group through all stages that it has not passed: sample, score, judge. Cancelled when the batch is
        full."""
        await self._rollout.sample(work)
        if not work.rewards:
            await self._rewards.score(work)
        if self._judges is not None and not work.is_judged:
            await self._judges.judge(work)
        self.landed.append(work.scored())
        least = self._context.config.algorithm.min_reward_range
        self._news.add(None, (work.prompt.slot.position, has_signal(work.rewards, min_range=least), work.saved()))

    def _begin(self, slots: Sequence[Slot]) -> None:
        """Begin the groups of these prompts, or continue them."""
        works = [self._carried.pop(slot.position) for slot in slots if slot.position in self._carried]
        have = {work.prompt.slot.position for work in works}
        prompts, notices = self._load_prompts([slot for slot in slots if slot.position not in have])
        works += [GroupWork(prompt=prompt) for prompt in prompts]
        for work in in_order(works):
            self._works[work.prompt.slot.position] = work
            self._ways.append(self._context.calls.start(self._follow(work)))
        for notice in notices:
            self._news.add(None, (notice["position"], None, None))

    async def _tell(self, _: None, news: list[tuple[int, bool | None, SavedGroup | None]]) -> list[None]:
        """Tell the rendezvous of finished groups, and begin with the prompts that it gives for them."""
        what = f"landing {len(news)} prompts"
        groups = [group for *_, group in news if group is not None]
        call = self._context.rendezvous.land([(position, signal) for position, signal, _ in news], groups)
        slots = await self._context.calls.reply(call, name="the rendezvous", what=what)
        if slots and self._outcome is None:
            self._begin(slots)
        return [None] * len(news)

    async def _until_full(self) -> RoundOutcome:
        wait_s, outcome = self._context.config.controllers.deadline_s / 4, None
        while outcome is None:
            call, what = self._context.rendezvous.wait_full(wait_s), "waiting for a full batch"
            # the rendezvous keeps `wait_s`; the longer limit here is for one that does not reply at all
            outcome = await self._context.calls.reply(call, name="the rendezvous", what=what, deadline_s=2 * wait_s)
        return outcome

    def _keep(self, outcome: RoundOutcome) -> list[GroupWork]:
        """Return the groups to train on, and keep carried-over groups for the next step."""
        kept, carried = set(outcome.kept), set(outcome.carried)
        for position, work in self._works.items():
            is_useless = position not in kept and (position not in carried or self._restarts)
            if is_useless and work.group is not None:
                self.dropped.append(work.group.ref)
                work.group = None
            if position in carried:
                work.rewards, work.scores = [], []
                self._carried[position] = work
        return [work for position, work in self._works.items() if position in kept]


def in_order(works: Sequence[GroupWork]) -> list[GroupWork]:
    """Return the groups, sorted by their place in the run's order of prompts."""
    return sorted(works, key=lambda work: work.prompt.slot.position)
