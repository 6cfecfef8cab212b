"""The simulated generation phase: prompts are drawn, sampled, judged and replaced until the batch is full.

Consumes: prompts by position.
Produces: the outcome of the real sampling rule. Which cell has which role (the caller wakes and moves cells), and
everything after the batch is full, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from yatt_mm.batching.dynamic_sampling import SamplingOutcome, SamplingRule, StepSampling, Tail, deal
from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.fleet import Fleet
from yatt_mm.simulator.modelled_engine import Request
from yatt_mm.simulator.workload import SimulatedPrompt, Workload


@dataclass(slots=True, eq=False)
class _Group:
    prompt: SimulatedPrompt
    version: int
    """The version of the policy with which the group was started."""
    num_to_judge: list[int] = field(default_factory=list)
    """[G] the verdicts that each response still waits for."""
    num_judged: int = 0

    @property
    def is_judged(self) -> bool:
        """True when all its responses are judged."""
        return self.num_judged == len(self.num_to_judge)


@dataclass(slots=True)
class Tally:
    """Counts of the requests of one role, by their outcome; each request is counted once."""

    num_dispatched: int = 0
    num_ended: int = 0
    num_aborted: int = 0


class GenerationPhase:
    """All generation phases of a run, one at a time."""

    def __init__(
        self, config: SimulationConfig, workload: Workload, events: Events, *, holds_verdicts: bool = False
    ) -> None:
        """With `holds_verdicts` the judge gets nothing before all responses are there."""
        self.rollout = Fleet(config.rollout, config.devices.per_cell, events, self._answered)
        self.genrm = Fleet(config.genrm, config.devices.per_cell, events, self._judged)
        self.on_change: Callable[[], None] = lambda: None
        """Called when a request ended."""
        self.rollout_tally, self.genrm_tally = Tally(), Tally()
        self.num_handing_over = 0
        self.step = -1
        self.version = 0
        """The number of training steps behind the engines' weights."""
        self._config, self._workload, self._events = config, workload, events
        self._holds_verdicts = holds_verdicts
        self._held: list[Request] = []
        self._groups: dict[int, _Group] = {}
        self._sampling: StepSampling | None = None
        self._is_open = False
        self._next_position = 0
        self._carried: tuple[int, ...] = ()
        self._expected_signal_frac = 1.0
        work = config.workload
        self._rule = SamplingRule(
            num_groups=work.prompts_per_step,
            replaces_groups=config.sampling.replaces_groups,
            max_prompts=int(work.prompts_per_step * config.sampling.max_prompts_factor),
            over_dispatch=config.sampling.over_dispatch,
            tail=config.sampling.tail,
        )

    @property
    def sampling(self) -> StepSampling:
        """The batch of the present step."""
        assert self._sampling is not None
        return self._sampling

    @property
    def is_done(self) -> bool:
        """True when the batch is full, or will not get more groups."""
        return self.sampling.is_done

    @property
    def num_held(self) -> int:
        """The number of requests to GenRM that wait until the last response is sampled."""
        return len(self._held)

    @property
    def oldest_version(self) -> int:
        """The policy version with which the oldest group in flight was started; the present one if there is none."""
        flying = (group.version for group in self._groups.values() if not group.is_judged)
        return min(flying, default=self.version)

    def begin(self, over_dispatch: float | None = None) -> None:
        """Start a step's batch, with another over-dispatch than the config's if one is given."""
        self.step += 1
        rule, carried = self._rule, self._carried
        if over_dispatch is not None:
            rule = replace(rule, over_dispatch=over_dispatch)
        self._sampling = StepSampling(rule, carried=carried, expected_signal_frac=self._expected_signal_frac)
        self._is_open = True
        for position in carried:
            if position not in self._groups:
                self._start(position)
            elif self._groups[position].is_judged:
                self._finish(self._groups[position])
        self._draw()

    def end(self) -> SamplingOutcome:
        """Close the step's batch and return its outcome. The groups of its tail are aborted, or stay if they
        continue."""
        outcome = self.sampling.outcome()
        self._is_open = False
        for position in (*outcome.accepted, *outcome.fillers, *outcome.rejected):
            self._groups.pop(position, None)
        if self._rule.tail is not Tail.CONTINUE:
            self._abort({*outcome.dropped, *outcome.carried})
        self._carried = outcome.carried
        self._expected_signal_frac = outcome.expected_signal_frac
        return outcome

    def _abort(self, groups: set[int]) -> None:
        if not groups:
            return
        self.rollout_tally.num_aborted += self.rollout.drop(groups)
        self.genrm_tally.num_aborted += self.genrm.drop(groups)
        kept = [request for request in self._held if request.group not in groups]
        self.genrm_tally.num_aborted += len(self._held) - len(kept)
        self._held = kept
        for position in groups:
            self._groups.pop(position, None)

    def _draw(self) -> None:
        num_wanted = self.sampling.num_wanted
        positions = range(self._next_position, self._next_position + num_wanted)
        self._next_position += num_wanted
        self.sampling.start(positions)
        for share in deal(positions, num_controllers=self._config.controllers.num):
            for position in share:
                self._start(position)

    def _start(self, position: int) -> None:
        prompt = self._workload.prompt(position)
        self._groups[position] = _Group(prompt=prompt, version=self.version)
        work = self._config.workload
        part = (("prompt", position), work.prompt_tokens.value, work.patches_per_prompt.value)
        requests = [
            Request(group=position, sample=i, num_left=float(length), prefixes=(part,))
            for i, length in enumerate(prompt.response_lengths)
        ]
        self._groups[position].num_to_judge = [work.verdicts_per_response] * len(requests)
        self.rollout_tally.num_dispatched += len(requests)
        self.rollout.submit(requests)

    def _answered(self, request: Request) -> None:
        self.rollout_tally.num_ended += 1
        group = self._groups[request.group]
        self.num_handing_over += 1
        delay_s = self._config.handover_s.value
        if delay_s:
            self._events.plan(self._events.now_s + delay_s, lambda: self._hand_over(group, request.sample))
        else:
            self._hand_over(group, request.sample)

    def _hand_over(self, group: _Group, sample: int) -> None:
        self.num_handing_over -= 1
        position = group.prompt.position
        if self._groups.get(position) is not group:
            return  # the group was aborted meanwhile
        work = self._config.workload
        question = (("question", position), work.judge_prompt_tokens.value, work.patches_per_prompt.value)
        response = (("response", position, sample), float(group.prompt.response_lengths[sample]), 0.0)
        scale = self._workload.verdict_scale(self.step)
        requests = [
            Request(group=position, sample=sample, num_left=max(1.0, length * scale), prefixes=(question, response))
            for length in group.prompt.verdict_lengths[sample]
        ]
        self.genrm_tally.num_dispatched += len(requests)
        self._held += requests
        if not self._holds_verdicts or (self.rollout.num_present == 0 and self.num_handing_over == 0):
            held, self._held = self._held, []
            self.genrm.submit(held)
        self.on_change()

    def _judged(self, request: Request) -> None:
        self.genrm_tally.num_ended += 1
        group = self._groups[request.group]
        group.num_to_judge[request.sample] -= 1
        if group.num_to_judge[request.sample] == 0:
            group.num_judged += 1
        if group.is_judged and self._is_open:
            self._finish(group)
            if not self.sampling.is_done:
                self._draw()
        self.on_change()

    def _finish(self, group: _Group) -> None:
        self.sampling.finish(group.prompt.position, has_signal=group.prompt.has_signal)
