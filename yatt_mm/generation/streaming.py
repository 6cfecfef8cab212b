"""Generation phases as a stream: every group goes to the next stage at once, and further prompts come in.

Consumes: prompts as the rendezvous deals them out.
Produces: this controller's groups of the batch.
Waits for: its own calls, and the news that the batch is full. When the batch is full, groups in flight are cut off, and
dropped or carried over into the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from yatt_mm.algorithms.advantages import has_signal
from yatt_mm.batching.dynamic_sampling import Tail
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.generation.group_work import CHUNK_SIZE, GroupWork, PhaseContext
from yatt_mm.generation.judge_stage import JudgeStage
from yatt_mm.generation.metrics import StepMeter
from yatt_mm.generation.reward_stage import RewardStage
from yatt_mm.generation.rollout_stage import RolloutStage
from yatt_mm.generation.rounds import in_order, scored
from yatt_mm.protocol.control import Prompt, ScoredGroup, Slot
from yatt_mm.protocol.rollout import SamplingSettings

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
        self.notices: list[dict[str, Any]] = []
        """Notices of prompts that could not be made."""
        self._context = context
        self._load_prompts = load_prompts
        self._carried = carried
        self._works: dict[int, GroupWork] = {}
        self._answered: list[GroupWork] = []
        """The groups with all responses that were not sent to the reward workers yet."""
        self._news: list[tuple[int, bool | None]] = []
        """Finished groups that were not yet reported to the rendezvous."""
        self._outcome: RoundOutcome | None = None
        rule = context.config.sampling_rule()
        self._restarts = rule.tail is Tail.RESTART
        chunk_size = CHUNK_SIZE if rule.over_dispatch == 1 else 1  # a call comes back with its slowest group
        on_scored = self._land
        if judging_for is not None and context.team.judges:
            chunk_size = 1
            on_scored = JudgeStage(context, judging_for, self._land, chunk_size=chunk_size).add
        self._scoring = RewardStage(context, on_scored)
        self._answering = RolloutStage(
            context,
            sampling,
            num_samples=context.config.rollout.group_size,
            on_answered=self._score,
            chunk_size=chunk_size,
        )

    def run(self, slots: Sequence[Slot]) -> tuple[list[GroupWork], RoundOutcome]:
        """Run the stream from this controller's first prompts to the full batch. Return (kept groups in the run's
        order, how it was filled).

        Raises:
            WorkerError: a worker failed or was late.
            PhaseAbortedError: another controller failed or was late.
        """
        pending = self._context.pending
        self._await_full()
        self._take(slots)
        pending.run(lambda: self._outcome is not None, on_late=self._scoring.restart_late)
        assert self._outcome is not None
        self._answering.stop()
        pending.run(lambda: not self._answering.num_sent)
        return in_order(self._keep(self._outcome)), self._outcome

    def _take(self, slots: Sequence[Slot]) -> None:
        """Begin with these prompts, or continue them."""
        works = [self._carried.pop(slot.position) for slot in slots if slot.position in self._carried]
        have = {work.prompt.slot.position for work in works}
        prompts, notices = self._load_prompts([slot for slot in slots if slot.position not in have])
        works += [GroupWork(prompt=prompt) for prompt in prompts]
        self._works.update({work.prompt.slot.position: work for work in works})
        self._answering.add(in_order(works))
        self.notices += notices
        for notice in notices:
            self._tell(notice["position"], None)

    def _score(self, works: list[GroupWork]) -> None:
        self._answered += works
        self._context.pending.soon(self._send_answered)

    def _send_answered(self) -> None:
        works, self._answered = self._answered, []
        for begin in range(0, len(works), CHUNK_SIZE):
            self._scoring.add(works[begin : begin + CHUNK_SIZE])

    def _land(self, works: list[GroupWork]) -> None:
        self.landed += scored(works)
        for work in works:
            self._tell(work.prompt.slot.position, has_signal(work.rewards))

    def _tell(self, position: int, with_signal: bool | None) -> None:
        self._news.append((position, with_signal))
        self._context.pending.soon(self._send_news)

    def _send_news(self) -> None:
        news, self._news = self._news, []
        call = self._context.team.rendezvous.land.remote(self._context.controller, news)
        self._context.pending.then(call, self._take_more, name="the rendezvous", what=f"landing {len(news)} prompts")

    def _take_more(self, slots: list[Slot]) -> None:
        if slots and self._outcome is None:
            self._take(slots)

    def _await_full(self) -> None:
        wait_s = self._context.config.controllers.deadline_s / 4
        call = self._context.team.rendezvous.wait_full.remote(self._context.controller, wait_s)
        self._context.pending.then(
            call, self._hear, name="the rendezvous", what="waiting for a full batch", is_progress=False
        )

    def _hear(self, outcome: RoundOutcome | None) -> None:
        self._outcome = outcome
        if outcome is None:
            self._await_full()

    def _keep(self, outcome: RoundOutcome) -> list[GroupWork]:
        """Return the groups to train on, and keep carried-over groups for the next step."""
        kept, carried = set(outcome.kept), set(outcome.carried)
        for position, work in self._works.items():
            is_useless = position not in kept and (position not in carried or self._restarts)
            if is_useless and work.group is not None:
                self._context.client.release([work.group.ref])
                work.group = None
            if position in carried:
                work.rewards, work.scores = [], {}
                self._carried[position] = work
        return [work for position, work in self._works.items() if position in kept]
