"""The configuration of a simulation: one YAML file, in which every modelled speed has its value and its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from yatt_mm.batching.dynamic_sampling import Tail
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.values import Section
from yatt_mm.config.yaml_file import explain, read_tree

NO_SOURCE = "given without a source"

HUGE, TINY = 1e18, 1e-6
"""The bounds for the numbers of a configuration, apart from 0. A number outside of them is a mistake, and the simulator
cannot compute with it."""

Amount = Annotated[float, Field(ge=0, le=HUGE, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=TINY, le=HUGE, allow_inf_nan=False)]
Tokens = Annotated[float, Field(ge=1, le=HUGE, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveShare = Annotated[float, Field(ge=TINY, le=1, allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**6)]

Number = TypeVar("Number", bound=float)


class Sourced(Section, Generic[Number]):
    """A number and its source. A plain number in YAML becomes a number without a source."""

    value: Number
    """The number that the simulation uses."""
    source: str
    """The source: a paper, a data sheet, a measurement, or the word assumed and why."""

    @model_validator(mode="before")
    @classmethod
    def _with_source(cls, given: object) -> object:
        if isinstance(given, bool):
            raise ValueError("wanted a number")
        return given if isinstance(given, dict | Sourced) else {"value": given, "source": NO_SOURCE}

    @classmethod
    def unused(cls, value: float) -> Self:
        """Return a default value that switches a feature off and so needs no source."""
        return cls.model_validate({"value": value, "source": "switched off"})


class RunSection(Section):
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of all random draws. All layouts get the same prompts and lengths."""
    steps: Count = 3
    """The number of training steps to simulate. The reported figures are means over these steps."""


class DevicesSection(Section):
    num: Count
    """The total number of devices."""
    per_cell: Count
    """The number of devices in a cell, the unit that changes its role. A whole number of engines of each role must fit
    into a cell."""


class ControllersSection(Section):
    num: Count = 1
    """The number of parallel controllers."""
    meeting_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds that one meeting of all controllers takes, whatever is exchanged."""
    meeting_per_controller_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds that each controller adds to the time of a meeting."""
    plan_per_sample_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds per sample that the controllers need in a step to gather the sample's numbers and to plan it."""


class LengthSection(Section):
    median: Sourced[Tokens]
    """The median length in tokens."""
    sigma: Sourced[Spread]
    """The standard deviation of the logarithm of the length, in the lognormal body of the distribution."""
    tail_frac: Sourced[Share] = Sourced[Share].unused(0)
    """The share of the samples whose length comes from the Pareto tail, from 0 to 1."""
    tail_alpha: Sourced[Positive] = Sourced[Positive].unused(1.5)
    """The exponent of the Pareto tail. A smaller exponent gives a heavier tail."""
    max_tokens: Sourced[Tokens]
    """The largest length in tokens. Longer samples are cut off there."""
    prompt_correlation: Sourced[Share] = Sourced[Share].unused(0)
    """The share of the variance of lengths that all samples of one prompt have in common, from 0 to 1."""


class WorkloadSection(Section):
    prompts_per_step: Count
    """The number of groups in a full batch."""
    group_size: Count
    """The number of responses to each prompt."""
    prompt_tokens: Sourced[Amount]
    """The number of tokens in a prompt of the policy, with image tokens expanded."""
    judge_prompt_tokens: Sourced[Amount]
    """The number of tokens in the judge's instructions and question, with image tokens expanded, without the
    response."""
    patches_per_prompt: Sourced[Amount] = Sourced[Amount].unused(0)
    """The number of patches per prompt that the vision tower of the policy and that of the judge read."""
    response: LengthSection
    """The distribution of the number of tokens that the policy samples per response."""
    verdict: LengthSection
    """The distribution of the number of tokens that the judge samples per verdict."""
    verdicts_per_response: Count = 1
    """The number of verdicts on each response."""
    signal_frac: Sourced[Share] = Sourced[Share].unused(1)
    """The share of the prompts whose group has different rewards and so gives a training signal, from 0 to 1."""
    drift: Sourced[Positive] = Sourced[Positive].unused(1)
    """The factor by which verdict lengths are multiplied at the last step. It starts at 1 in the first step and changes
    by the same ratio at each step."""


class SamplingSection(Section):
    replaces_groups: bool = False
    """True if groups without a training signal (all rewards equal) are replaced by new groups, as in DAPO."""
    max_prompts_factor: Factor = 10.0
    """The largest number of prompts that a step may use, as a multiple of the batch."""
    over_dispatch: Factor = 1.0
    """The number of groups in flight for each group that the batch still lacks."""
    tail: Tail = Tail.DROP
    """What happens to the groups that are still in flight when the batch is full."""


class EngineSection(Section):
    devices: Count
    """The number of devices of one engine."""
    decode_fixed_s: Sourced[Positive]
    """The seconds of a decode step that do not depend on the batch size; they are spent on reading the weights."""
    decode_per_sequence_s: Sourced[Amount]
    """The seconds that each sequence adds to a decode step, for reading its keys and values and for its computation."""
    prefill_per_token_s: Sourced[Amount]
    """The seconds per prompt token that is not cached."""
    vision_per_patch_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds per patch that the vision tower reads."""
    request_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds that every request costs in addition to its tokens, for reading, scheduling and answering it."""
    max_num_seqs: Count
    """The largest number of sequences that an engine works on at the same time."""
    kv_tokens: Sourced[Tokens]
    """The number of tokens that the engine's key-value cache holds."""
    sleep_s: Sourced[Amount]
    """The seconds that the engine needs to go to sleep."""
    wake_s: Sourced[Amount]
    """The seconds that the engine needs to wake up, including the time to load its weights."""


class TrainingSection(Section):
    flops_per_token: Sourced[Amount]
    """The number of floating-point operations per trained token, for forward, backward and recomputation."""
    flops_per_patch: Sourced[Amount] = Sourced[Amount].unused(0)
    """The number of floating-point operations per patch in the vision tower."""
    peak_flops: Sourced[Positive]
    """The peak rate of one device in floating-point operations per second."""
    mfu: Sourced[PositiveShare]
    """The share of the peak rate that training reaches on `reference_devices` devices (model FLOPs utilization)."""
    reference_devices: Count
    """The number of devices at which `mfu` holds."""
    scaling_exponent: Sourced[PositiveShare] = Sourced[PositiveShare].unused(1)
    """The exponent by which training throughput grows with the number of devices. With 1 it grows in proportion."""
    devices_per_replica: Count
    """The number of devices of one data-parallel replica: its tensor, context and pipeline ranks together."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1, le=10**9)]
    """The largest number of tokens in a microbatch, for the real balancing code."""
    sleep_s: Sourced[Amount]
    """The seconds to move the training state off the devices."""
    wake_s: Sourced[Amount]
    """The seconds to move the training state back to the devices."""


class PlacementSection(Section):
    min_gain_frac: Share = 0.03
    """The smallest gain for which the placement policy moves cells, as a share; it prevents moves back and forth."""
    decide_every_s: Positive = 2.0
    """The seconds between two placement decisions within a generation phase."""


class ExternalSection(Section):
    streams: bool = False
    """True if the external judge gets each response as soon as it is finished. False if it gets them only when all are
    finished, like verl's batch reward manager."""
    streams_source: str = "verl recipe/genrm_remote: reward_model.reward_manager=batch"
    """The source for the value of `streams`."""
    paper_genrm_frac: Sourced[Share]
    """The share of the devices that the paper's layout with an external GenRM gives to GenRM."""


class AsyncSection(Section):
    staleness: Annotated[int, Field(ge=0, le=1000)] = 1
    """The largest number of steps by which a rollout may be older than the policy that trains on it."""


class SearchSection(Section):
    max_splits: Count = 64
    """The largest number of splits that a search tries. If there are fewer possible splits, the search tries all of
    them."""
    steps: Count | None = None
    """The number of steps to simulate for each split that a search tries. None means all steps of the run."""


class SimulationConfig(Section):
    """The configuration of a whole simulation."""

    run: RunSection = RunSection()
    devices: DevicesSection
    controllers: ControllersSection = ControllersSection()
    workload: WorkloadSection
    sampling: SamplingSection = SamplingSection()
    rollout: EngineSection
    genrm: EngineSection
    training: TrainingSection
    placement: PlacementSection = PlacementSection()
    external: ExternalSection
    asynchronous: AsyncSection = AsyncSection()
    search: SearchSection = SearchSection()
    publish_s: Sourced[Amount]
    """The seconds from the end of an update until the new weights have reached the engines."""
    handover_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """The seconds from a finished response until it is in the judge's queue."""

    @property
    def num_cells(self) -> int:
        """The number of cells, which are the units that change their role."""
        return self.devices.num // self.devices.per_cell

    @model_validator(mode="after")
    def _check_shapes(self) -> SimulationConfig:
        num, cell = self.devices.num, self.devices.per_cell
        if num % cell or num < 2 * cell:
            raise ValueError(f"devices.num is {num} and devices.per_cell {cell}; there must be two or more whole cells")
        for name, devices in (
            ("rollout.devices", self.rollout.devices),
            ("genrm.devices", self.genrm.devices),
            ("training.devices_per_replica", self.training.devices_per_replica),
        ):
            if cell % devices:
                raise ValueError(f"{name} is {devices}; it must divide devices.per_cell, which is {cell}")
        for name, engine in (("rollout", self.rollout), ("genrm", self.genrm)):
            longest = self._longest(name)
            if longest > engine.kv_tokens.value:
                raise ValueError(
                    f"{name}.kv_tokens is {engine.kv_tokens.value:g}, but one request may need {longest:g}: "
                    "raise it, or lower max_tokens"
                )
        longest = self.workload.prompt_tokens.value + self.workload.response.max_tokens.value
        if longest > self.training.max_tokens_per_microbatch:
            raise ValueError(
                f"a sample may have {longest:g} tokens; training.max_tokens_per_microbatch is "
                f"{self.training.max_tokens_per_microbatch}: raise it"
            )
        return self

    def _longest(self, name: str) -> float:
        work = self.workload
        response = work.response.max_tokens.value
        if name == "rollout":
            return work.prompt_tokens.value + response
        return work.judge_prompt_tokens.value + response + work.verdict.max_tokens.value * max(1.0, work.drift.value)


def load_simulation(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> SimulationConfig:
    """Read a YAML file, apply `dotted.key=value` overrides, and check everything.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    return parse_simulation(read_tree(path, overrides))


def parse_simulation(tree: dict[str, Any]) -> SimulationConfig:
    """Return the configuration that a tree of plain values (nested dicts, as read from YAML) describes."""
    try:
        return SimulationConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, SimulationConfig) for problem in error.errors())) from error
