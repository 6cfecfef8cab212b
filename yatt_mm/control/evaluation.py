"""The evaluation of one controller's share of the held-out sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from yatt_mm.algorithms.eval_metrics import measure
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import DataError
from yatt_mm.config.eval_section import EvalSetSection, held_out_key_of
from yatt_mm.config.run_config import Config
from yatt_mm.control.kept_rollouts import KeptRollouts
from yatt_mm.generation.batch_filler import BatchFiller, EnterPhase
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.generation.rounds import answer
from yatt_mm.protocol.control import HELD_OUT, RunSet, ScoredGroup
from yatt_mm.protocol.faults import FUNCTION
from yatt_mm.protocol.placement_model import Phase
from yatt_mm.protocol.rollout import SamplingSettings
from yatt_mm.protocol.step_meter import StepMeter

ACCURACY = "accuracy"
ACCURACIES = (ACCURACY, "acc")
"""The part of a reward that says whether a response is right (`acc` is verl's); without it the reward itself does."""
MAX_SOURCES = 50
"""The most sources of a set that are measured apart."""
SOURCE = "data_source"
"""The field of a sample that says where it comes from, as verl calls it."""
GREEDY = EvalSetSection(path="")
"""The settings of the set of `data.eval`: one greedy response to each prompt."""


class Evaluation:
    """Measures the policy on the held-out sets."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[RunSet],
        prompts: PromptSource,
        filler: BatchFiller,
        rendezvous: RendezvousClient,
        kept: KeptRollouts,
        meter: StepMeter,
        enter_phase: EnterPhase,
        tell: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> None:
        """`tell` hands over notices of samples that were skipped."""
        self._config = config
        self._sets = sets
        self._prompts = prompts
        self._filler = filler
        self._rendezvous = rendezvous
        self._kept = kept
        self._meter = meter
        self._enter_phase = enter_phase
        self._tell = tell

    def run(self, step: int) -> list[ScoredGroup]:
        """Sample and score the responses to this controller's share of all sets, note their metrics, and return them.

        Raises:
            DataError: no sample of a set can be used.
            WorkerError: a worker or another controller failed or was late.
        """
        shares = []
        for held_out in self._sets:
            section = self._config.eval.sets.get(held_out.name, GREEDY)
            with self._enter_phase(Phase.ROLLOUT, clock="eval", group_size=section.num_samples) as entered:
                prompts, notices = self._prompts.load_eval(held_out)
                self._tell(notices)
                if not sum(self._rendezvous.gather(len(prompts))):
                    why = self._rendezvous.why_left_out()
                    raise DataError(f"all held-out samples were left out; check {held_out_key_of(held_out.name)}{why}")
                answered = partial(answer, prompts, self._sampling(section), num_samples=section.num_samples)
                name = f"evaluation {step}" + (f" of {held_out.name}" if held_out.name != HELD_OUT else "")
                groups = [work.scored() for work in self._filler.run(entered, name, answered)]
            shares.append((groups, held_out.num_samples))
            self._measure(held_out.name, groups, section.metrics)
        self._kept.keep_evaluation(shares, step=step)
        return [group for groups, _ in shares for group in groups]

    def _sampling(self, section: EvalSetSection) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            max_tokens=rollout.max_tokens,
            temperature=section.temperature or 1.0,
            greedy=not section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            stop=tuple(rollout.stop),
        )

    def _measure(self, name: str, groups: Sequence[ScoredGroup], metrics: Sequence[str]) -> None:
        """Add the metrics of a set. Those of `data.eval`, or without it of all sets together, are those of the run."""
        prefixes = [] if name == HELD_OUT else [f"eval/{name}/"]
        if name == HELD_OUT or self._sets[0].name != HELD_OUT:
            prefixes.append("eval/")
        own = [source for group in groups if isinstance(source := group.prompt.fields.get(SOURCE), str)]
        num_sources = len(set().union(*self._rendezvous.gather(set(own))))
        for group in groups:
            self._meter.add_sum("eval/num_errors", group.num_failed(FUNCTION))
            scores = scores_of(group)
            values = {ACCURACY: sum(scores) / len(scores)}
            values |= {metric: measure(metric, scores, group.votes) for metric in metrics}
            source = group.prompt.fields.get(SOURCE)
            for prefix in prefixes:
                self._meter.add_sum(f"{prefix}num_samples", len(group.rewards))
                for metric, value in values.items():
                    self._meter.add_mean(f"{prefix}{metric}", value, 1)
                    if 1 < num_sources <= MAX_SOURCES and isinstance(source, str):
                        self._meter.add_mean(f"{prefix}source/{source}/{metric}", value, 1)
                for part, given in group.parts.items():
                    if part not in ACCURACIES:
                        self._meter.add_given(f"{prefix}{part}/mean", given)


def scores_of(group: ScoredGroup) -> tuple[float, ...]:
    """Return [G] how right each response is: the part `accuracy` of its reward, or else the reward."""
    parts = next((group.parts[name] for name in ACCURACIES if name in group.parts), None)
    if parts is None:
        return group.rewards
    return tuple(0.0 if part is None else part for part in parts)
