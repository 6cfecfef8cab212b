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
"""Numbers beyond these are mistakes, and cannot be computed with."""

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
    """A number and its source. A plain number is a number without a source."""

    value: Number
    """The number."""
    source: str
    """The source: a paper, a data sheet, a measurement, or the word assumed and why."""

    @model_validator(mode="before")
    @classmethod
    def _with_source(cls, given: object) -> object:
        if isinstance(given, bool):
            raise ValueError("Input should be a number")
        return given if isinstance(given, dict | Sourced) else {"value": given, "source": NO_SOURCE}

    @classmethod
    def unused(cls, value: float) -> Self:
        """Return a default that switches something off and needs no source."""
        return cls.model_validate({"value": value, "source": "switched off"})


class RunSection(Section):
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of everything that is drawn at random; all layouts get the same prompts and lengths."""
    steps: Count = 3
    """Training steps to simulate; figures are means over them."""


class DevicesSection(Section):
    num: Count
    """The number of all devices."""
    per_cell: Count
    """The devices of a cell, the unit that changes role: whole engines of both roles fit."""


class ControllersSection(Section):
    num: Count = 1
    """The number of parallel controllers."""
    meeting_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds of a meeting of all controllers, for any content."""
    meeting_per_controller_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds that each controller adds to a meeting."""
    plan_per_sample_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds per sample of the step for gathering its numbers and planning."""


class LengthSection(Section):
    median: Sourced[Tokens]
    """The number of tokens that half of the samples exceed."""
    sigma: Sourced[Spread]
    """The standard deviation of the logarithm."""
    tail_frac: Sourced[Share] = Sourced[Share].unused(0)
    """The share of the samples in the Pareto tail."""
    tail_alpha: Sourced[Positive] = Sourced[Positive].unused(1.5)
    """The exponent of the tail; smaller is heavier."""
    max_tokens: Sourced[Tokens]
    """The length at which samples are cut off."""
    prompt_correlation: Sourced[Share] = Sourced[Share].unused(0)
    """The share of the variance that the samples of a prompt have in common, from 0 to 1."""


class WorkloadSection(Section):
    prompts_per_step: Count
    """Groups of a full batch."""
    group_size: Count
    """Responses per prompt."""
    prompt_tokens: Sourced[Amount]
    """Tokens of the policy's prompt, images expanded."""
    judge_prompt_tokens: Sourced[Amount]
    """Tokens of the judge's instructions and question, images expanded, without the response."""
    patches_per_prompt: Sourced[Amount] = Sourced[Amount].unused(0)
    """Patches that a vision tower reads per prompt, in both models."""
    response: LengthSection
    """Tokens that the policy samples."""
    verdict: LengthSection
    """Tokens that the judge samples per verdict."""
    verdicts_per_response: Count = 1
    """Judgements of each response."""
    signal_frac: Sourced[Share] = Sourced[Share].unused(1)
    """The share of the prompts whose rewards differ."""
    drift: Sourced[Positive] = Sourced[Positive].unused(1)
    """The factor of verdict lengths at the last step; it changes evenly (in ratio) from 1 at the first step."""


class SamplingSection(Section):
    replaces_groups: bool = False
    """True replaces groups without signal (DAPO)."""
    max_prompts_factor: Factor = 10.0
    """The most prompts that a step may use, as a multiple of the batch."""
    over_dispatch: Factor = 1.0
    """Groups in flight per group that is still missing."""
    tail: Tail = Tail.DROP
    """What happens to groups in flight when the batch is full."""


class EngineSection(Section):
    devices: Count
    """Devices of one engine."""
    decode_fixed_s: Sourced[Positive]
    """Seconds of a decode step for any batch: reading the weights."""
    decode_per_sequence_s: Sourced[Amount]
    """Seconds that each sequence adds to a decode step: reading its keys and values, computing."""
    prefill_per_token_s: Sourced[Amount]
    """Seconds per prompt token that is not cached."""
    vision_per_patch_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds per patch that the vision tower reads."""
    request_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds of every request in addition to its tokens: reading, scheduling, answering."""
    max_num_seqs: Count
    """Sequences that an engine works on at the same time."""
    kv_tokens: Sourced[Tokens]
    """Tokens that its key-value cache holds."""
    sleep_s: Sourced[Amount]
    """Seconds to go to sleep."""
    wake_s: Sourced[Amount]
    """Seconds to wake up, weights loaded."""


class TrainingSection(Section):
    flops_per_token: Sourced[Amount]
    """Operations per trained token, forward, backward and recompute."""
    flops_per_patch: Sourced[Amount] = Sourced[Amount].unused(0)
    """Operations per patch in the vision tower."""
    peak_flops: Sourced[Positive]
    """The peak operations per second of one device."""
    mfu: Sourced[PositiveShare]
    """The share of the peak that is reached at `reference_devices`."""
    reference_devices: Count
    """The number of devices at which `mfu` holds."""
    scaling_exponent: Sourced[PositiveShare] = Sourced[PositiveShare].unused(1)
    """Throughput grows with this power of the number of devices; 1 is perfect."""
    devices_per_replica: Count
    """The tensor, context and pipeline ranks of a data-parallel replica."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1, le=10**9)]
    """The most tokens of a microbatch; the real balance code uses it."""
    sleep_s: Sourced[Amount]
    """Seconds to move the training state off the devices."""
    wake_s: Sourced[Amount]
    """Seconds to bring it back."""


class PlacementSection(Section):
    min_gain_frac: Share = 0.03
    """The policy's hysteresis."""
    decide_every_s: Positive = 2.0
    """Seconds between decisions inside a generation phase."""


class ExternalSection(Section):
    streams: bool = False
    """True judges each response when it is there; False after all of them (verl's batch reward manager)."""
    streams_source: str = "verl recipe/genrm_remote: reward_model.reward_manager=batch"
    """Source of `streams`."""
    paper_genrm_frac: Sourced[Share]
    """Share of the devices that the paper's external layout gives to GenRM."""


class AsyncSection(Section):
    staleness: Annotated[int, Field(ge=0, le=1000)] = 1
    """The number of steps by which rollouts may be older than the policy that trains on them."""


class SearchSection(Section):
    max_splits: Count = 64
    """Splits to try in a search. With fewer possible splits all are tried."""
    steps: Count | None = None
    """Steps per try; by default all steps of the run."""


class SimulationConfig(Section):
    """A whole simulation."""

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
    """Seconds until the trained weights have reached the engines."""
    handover_s: Sourced[Amount] = Sourced[Amount].unused(0)
    """Seconds from a finished response to the judge's queue."""

    @property
    def num_cells(self) -> int:
        """The number of units that change role."""
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
    """Return the configuration of a tree of plain values."""
    try:
        return SimulationConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, SimulationConfig) for problem in error.errors())) from error
