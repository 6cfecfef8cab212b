"""The prompts of the present step, until its batch is full. The rendezvous owns them.

In rounds: deal the prompts that the sampling rule needs, replace those whose media are bad, sample and judge all of
them, and count which groups have signal. Which prompts are used depends on the run's order and on the rewards alone,
never on the speed or the number of controllers.

In a stream: as each group finishes, its controller gets the prompts that the batch still needs. When the batch is full,
groups in flight are dropped, or carried over into the next step.

In turns, which is both: the responses of a round's groups are sampled in a stream, and the groups are judged when the
stream is over. Groups that a stream cuts off are dropped, or carried over into the next stream, of this step or the
next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataplane.datasets.sampler import Source
from yatt_mm.batching.dynamic_sampling import SamplingRule, StepSampling, Tail
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.common.errors import CheckpointError
from yatt_mm.protocol.control import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """The result of a round, which all controllers get."""

    is_full: bool
    """False when another round follows."""
    kept: tuple[int, ...] = ()
    """The positions of the groups to train on, once the batch is full."""
    num_prompts_used: int = 0
    """The number of prompts that the step has used."""
    num_rejected: int = 0
    """The number of groups without signal that were replaced."""
    carried: tuple[int, ...] = ()
    """The positions of the groups with which the next stream begins."""


class StepBatches:
    """The steps' batches, one after the other."""

    def __init__(
        self, rule: SamplingRule, order: PromptOrder, *, in_turns: bool = False, expected_signal_frac: float = 1.0
    ) -> None:
        """`in_turns`: True if each stream of prompts fills one round of a step; False if it fills the whole step.
        `expected_signal_frac`: the share of groups, 0 to 1, that is expected to have signal."""
        self.order = order
        self.outcome: RoundOutcome | None = None
        """How the last stream was filled; None while it runs."""
        self._rule = rule
        self._in_turns = in_turns
        self._expected_signal_frac = expected_signal_frac
        self._step: StepSampling | None = None
        """The batch of the present step, which several rounds fill; None between steps."""
        self._stream: StepSampling | None = None
        self._round: dict[int, Slot] = {}
        """[position] the prompts of this round."""
        self._dealt: dict[int, tuple[Slot, int | None]] = {}
        """[position] the prompt and its controller, in a stream. Between streams: the prompts that the last stream
        carried over."""
        self._of_step: dict[int, tuple[Slot, int | None]] = {}
        """[position] all prompts that streams of the present step have dealt, but those that cannot be used."""
        self.dropped: frozenset[int] = frozenset()
        """The positions of the groups whose records nothing needs, now that the last stream or round is full."""

    def begin_step(self) -> None:
        """Note that a step begins. It has the prompts that were carried over."""
        self._of_step = dict(self._dealt)

    def deal(self, bad: Sequence[Sequence[int]]) -> list[list[Slot]]:
        """Return for each controller its further prompts. `bad`: for each controller, the positions of those prompts of
        its last share whose samples are left out for good.

        Prompts carried over from a stream before a checkpoint come first.

        The first call of a round deals what the batch still needs. Each later call replaces the bad samples, for the
        controller that had them.
        """
        if self._round:
            wanted = [len(share) for share in bad]
        else:
            num_wanted = self._open_step().num_wanted
            wanted = [len(range(c, num_wanted, len(bad))) for c in range(len(bad))]
        for position in (position for share in bad for position in share):
            self.order.set_aside(self._round.pop(position))
        carried = [self._dealt.pop(position)[0] for position in sorted(self._dealt)[: sum(wanted)]]
        slots = carried + self.order.take(sum(wanted) - len(carried))
        self._round.update({slot.position: slot for slot in slots})
        return _dealt_one_by_one(slots, wanted)

    def finish_round(self, landed: Sequence[Sequence[tuple[int, bool]]]) -> RoundOutcome:
        """Close a round and return its outcome. `landed`: for each controller, (position, has signal) of every group of
        the round."""
        assert self._step is not None
        groups = sorted(group for share in landed for group in share)
        assert [position for position, _ in groups] == sorted(self._round), "a group of the round is missing"
        self._step.start(sorted(self._round))
        self._round = {}
        for position, has_signal in groups:
            self._step.finish(position, has_signal=has_signal)
        if not self._step.is_done:
            return RoundOutcome(is_full=False)
        outcome, carried = self._outcome_of(self._step), tuple(sorted(self._dealt))
        self.dropped = frozenset(self._of_step.keys() - {*outcome.kept, *carried})
        num_prompts_used, self._step = self._step.num_used + len(carried), None
        return replace(outcome, num_prompts_used=num_prompts_used, carried=carried)

    def open(self, num_controllers: int) -> list[list[Slot]]:
        """Return for each controller the prompts with which a stream begins: carried-over ones, then new ones."""
        self.outcome = None
        carried, self._dealt = self._dealt, {}
        self._stream = StepSampling(
            self._rule_of_round() if self._in_turns else self._rule,
            carried=sorted(carried),
            expected_signal_frac=self._expected_signal_frac,
        )
        shares: list[list[Slot]] = [[] for _ in range(num_controllers)]
        homeless = []
        for _, (slot, owner) in sorted(carried.items()):
            homeless.append(slot) if owner is None else shares[owner % num_controllers].append(slot)
        new = self.order.take(self._stream.num_wanted)
        self._stream.start(slot.position for slot in new)
        for i, slot in enumerate([*homeless, *new]):
            shares[i % num_controllers].append(slot)
        self._dealt = {slot.position: (slot, c) for c, share in enumerate(shares) for slot in share}
        self._of_step |= self._dealt
        return shares

    def land(self, controller: int, position: int, has_signal: bool | None) -> list[Slot]:
        """Note that a group of the stream finished, or with None failed; return further prompts for its controller."""
        if self._stream is None:
            return []  # the group comes too late: the batch is full
        if has_signal is None:
            self.order.set_aside(self._dealt[position][0])
            self._stream.lose(position)
            del self._of_step[position]
        else:
            self._stream.finish(position, has_signal=has_signal)
        slots = self.order.take(self._stream.num_wanted)
        self._stream.start(slot.position for slot in slots)
        new = {slot.position: (slot, controller) for slot in slots}
        self._dealt |= new
        self._of_step |= new
        if self._stream.is_done:
            self.outcome = self._close_stream(self._stream)
        return slots

    def _open_step(self) -> StepSampling:
        """Return the batch of the present step. A new one begins only between rounds."""
        if self._step is None:
            in_rounds = replace(self._rule, deterministic=True, tail=Tail.DROP)
            self._step = StepSampling(in_rounds, expected_signal_frac=self._expected_signal_frac)
        return self._step

    def _rule_of_round(self) -> SamplingRule:
        """Return the sampling rule of one round of a step: engines sample until there are as many groups as the step
        still needs."""
        step = self._open_step()
        max_prompts = max(step.num_wanted, self._rule.max_prompts - step.num_used)
        return replace(self._rule, num_groups=step.num_wanted, max_prompts=max_prompts, replaces_groups=False)

    def _close_stream(self, stream: StepSampling) -> RoundOutcome:
        self._stream = None
        outcome = self._outcome_of(stream)
        if self._in_turns:
            self._round = {position: self._dealt[position][0] for position in outcome.kept}
            self._open_step().spend(outcome.num_prompts_used - len(outcome.kept) - len(outcome.carried))
        with_record = () if self._rule.tail is Tail.RESTART else outcome.carried
        self.dropped = frozenset(self._dealt.keys() - {*outcome.kept, *with_record})
        self._dealt = {position: self._dealt[position] for position in outcome.carried}
        return outcome

    def _outcome_of(self, step: StepSampling) -> RoundOutcome:
        outcome = step.outcome()
        if step.rule.replaces_groups:
            self._expected_signal_frac = outcome.expected_signal_frac
        return RoundOutcome(
            is_full=True,
            kept=(*outcome.accepted, *outcome.fillers),
            num_prompts_used=outcome.num_prompts_used,
            num_rejected=len(outcome.rejected),
            carried=outcome.carried,
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between steps (JSON)."""
        return self._state(self._dealt)

    def begun_state(self) -> dict[str, Any]:
        """Return the state (JSON) from which a step that streams have begun goes on: all its prompts are carried over,
        also those whose groups are finished."""
        return self._state(self._of_step)

    def _state(self, carried: Mapping[int, tuple[Slot, int | None]]) -> dict[str, Any]:
        return {
            "order": self.order.state(),
            "expected_signal_frac": self._expected_signal_frac,
            "carried": [{**dataclasses.asdict(slot), "controller": owner} for slot, owner in carried.values()],
        }

    def back_at(self, state: dict[str, Any]) -> StepBatches:
        """Return the same batches as they were at an earlier `state`."""
        return StepBatches.from_state(self._rule, state, in_turns=self._in_turns)

    @classmethod
    def from_state(
        cls,
        rule: SamplingRule,
        state: dict[str, Any],
        sources: Sequence[Source] | None = None,
        *,
        in_turns: bool = False,
    ) -> StepBatches:
        """Return the batches that `state` describes. Prompts that were carried over go to the controllers that had
        them, or, if there are fewer now, to those that have their place.

        Raises:
            BadRequestError: the present `sources` are not those of the state.
            CheckpointError: an earlier version wrote the state. Its prompts came in another order.
        """
        if "order" not in state:
            raise CheckpointError(
                "the checkpoint is of an earlier version, whose order of prompts cannot be continued; start a new run"
            )
        order = PromptOrder.from_state(state["order"], sources)
        expected_signal_frac = float(state.get("expected_signal_frac", 1.0))
        batches = cls(rule, order, in_turns=in_turns, expected_signal_frac=expected_signal_frac)
        for carried in state.get("carried", ()):
            fields = dict(carried)
            owner, slot = fields.pop("controller", None), Slot(**fields)
            batches._dealt[slot.position] = (slot, owner)
        return batches


def _dealt_one_by_one(slots: Sequence[Slot], wanted: Sequence[int]) -> list[list[Slot]]:
    """Return the prompts of each controller. They are given out one after another, until each controller has as many as
    it needs."""
    left = list(wanted)
    shares: list[list[Slot]] = [[] for _ in left]
    coming = iter(slots)
    while any(left):
        for controller, count in enumerate(left):
            if count:
                shares[controller].append(next(coming))
                left[controller] -= 1
    return shares
