"""The section `train`: how the policy is updated, and how the model is divided over training ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from models.lora.settings import LoraSettings
from yatt_mm.config.values import Count, Duration, Section
from yatt_mm.protocol.adam_settings import Schedule

PARTS = ("tower", "merger", "language")
"""The parts of a model."""
SCHEDULE_READS: dict[Schedule | None, dict[str, float | None]] = {
    None: {"warmup_steps": 0, "lr_final_frac": 1.0},
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 0},
    "linear": {"warmup_steps": 0},
    "cosine": {"warmup_steps": 0},
    "cosine_with_min_lr": {"warmup_steps": 0, "lr_final_frac": 0.1},
    "warmup_stable_decay": {"warmup_steps": 0, "lr_final_frac": 0.0, "lr_decay_steps": None},
}
"""By schedule the settings that it reads, with their defaults."""


class ParallelSection(Section):
    tp: Count = 1
    """The number of tensor-parallel ranks."""
    pp: Count = 1
    """The number of pipeline stages."""
    vpp: Count = 1
    """Groups of layers per pipeline stage (virtual pipeline); above 1 the stages wait less for each other."""
    first_stage_layers: Count | None = None
    """The layers of the first stage, which has the vision tower too; by default all stages have the same number."""
    last_stage_layers: Count | None = None
    """The layers of the last stage, which has the head too; by default all stages have the same number."""
    sp: bool = False
    """True cuts norms and residuals over the tensor-parallel ranks as well (sequence parallelism)."""
    cp: Count = 1
    """The number of context-parallel ranks: each holds a part of every sequence."""
    cp_comm: Literal["a2a", "allgather"] = "a2a"
    """How context-parallel ranks attend to each other's tokens: exchange heads for tokens, or gather all keys and
    values."""
    cp_order: Literal["contiguous", "zigzag"] = "contiguous"
    """Which tokens a context-parallel rank holds: a slice of the packed stream, or from each sequence a slice of both
    ends."""
    ep: Count = 1
    """Ranks of a stage over which the experts of a layer are divided, across replicas; 1 for models without experts."""
    etp: Count = 1
    """Ranks over which each expert's matrices are cut; 1 for models without experts."""
    dp: Count | None = None
    """The number of data-parallel replicas; by default the devices that tp, pp and cp leave."""


class LoraSection(Section):
    rank: Annotated[int, Field(ge=0)] = 0
    """Above 0, all weights are frozen, and beside each target's weight the product of two matrices of this rank is
    trained (LoRA). docs/lora.md says what is exported."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The product is multiplied by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = ["language"]
    """The linear layers with such a product: those of the parts `language`, `tower` and `merger`, or single ones such
    as `language.q_proj` and `tower.qkv`, named after their part and as in Hugging Face's model."""

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: list[str]) -> list[str]:
        for target in targets:
            if target.partition(".")[0] not in PARTS:
                raise ValueError(
                    f"{target} does not begin with a part of the model; write language.{target}, tower.{target} or "
                    f"merger.{target}, or a part alone, which is all of its linear layers"
                )
        return targets

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        given = [name for name in self.model_dump(exclude_defaults=True) if name != "rank"]
        if not self.rank and given:
            raise ValueError(f"{given[0]} is given, and rank is 0, which trains all weights; set rank, such as 8")
        return self

    def settings(self) -> LoraSettings | None:
        """Return the settings as training ranks read them; None if all weights are trained."""
        return LoraSettings(rank=self.rank, alpha=self.alpha, targets=tuple(self.targets)) if self.rank else None


class TrainSection(Section):
    steps: Count
    """The number of training steps."""
    max_time: Duration | None = None
    """The time after which the run has ended, counted from its start, such as `11h` or `11:30:00`. Before it runs out,
    the run is saved and stopped with exit status 75, and the same command with `--resume` goes on."""
    prompts_per_step: Count
    """The prompts drawn per step, over all controllers."""
    lr: Annotated[float, Field(gt=0)]
    """The learning rate of AdamW after the warm-up."""
    lr_schedule: Schedule | None = None
    """The schedule of the learning rate, as transformers defines it: `constant`, `constant_with_warmup`, `linear`,
    `cosine`, `cosine_with_min_lr` or `warmup_stable_decay`. By default the rate falls linearly to `lr_final_frac`, from
    the first update on."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates over which the learning rate rises from 0."""
    lr_final_frac: Annotated[float | None, Field(ge=0, le=1, validate_default=True)] = None
    """The share of `lr` that is left at the last step: by default 1 without a schedule, which keeps the rate constant,
    0.1 in `cosine_with_min_lr` and 0 in `warmup_stable_decay`. Other schedules have none."""
    lr_decay_steps: Count | None = None
    """Optimizer updates at the end over which `warmup_stable_decay` falls; by default a tenth of all."""
    part_lr: dict[Literal["tower", "merger", "language"], Annotated[float, Field(gt=0)]] = {}
    """Learning rates of parts of the model in the place of `lr`, for example `{tower: 1e-6}`: `tower`, `merger`,
    `language`. They follow the same schedule."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The weight decay of AdamW; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The betas of AdamW."""
    clip_grad: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """The largest norm of the global gradient; `.inf` sets no limit."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the optimizer's state that stays, and is updated, in host memory. Needs a GPU, and bfloat16."""
    num_minibatches: Count = 1
    """Optimizer updates per step; above 1 the later ones are off-policy and the clip matters."""
    max_tokens_per_microbatch: Count = 8192
    """The most tokens, images expanded, of one forward pass."""
    max_patches_per_microbatch: Count | None = None
    """The most image patches of one forward pass; by default the patches of its tokens' images."""
    recompute: Literal["none", "full", "selective"] = "none"
    """The activations that are computed again in the backward pass to save memory: none, whole layers of the decoder
    and of the tower, or the decoder's attention alone."""
    freeze: Annotated[list[Literal["tower", "merger", "language"]], Field(max_length=2)] = []
    """Parts that are not trained, two at most: the vision tower, its merger (which makes tokens of patches), the
    language model."""
    lora: LoraSection = LoraSection()
    overlap_grad_reduce: bool = False
    """True sums gradients over replicas during the backward pass; useful with many replicas on GPUs."""
    parallel: ParallelSection = ParallelSection()

    @field_validator("warmup_steps", "lr_final_frac", "lr_decay_steps")
    @classmethod
    def _is_of_schedule(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the schedule's default for a setting without a value, and refuse a value that it does not read."""
        if "lr_schedule" not in info.data:  # it was refused
            return value
        schedule, reads = info.data["lr_schedule"], SCHEDULE_READS[info.data["lr_schedule"]]
        is_given = value is not None and (info.field_name, value) != ("warmup_steps", 0)
        if is_given and info.field_name not in reads:
            others = [str(name) for name, settings in SCHEDULE_READS.items() if name and info.field_name in settings]
            own = f"the schedule {schedule}" if schedule else "the rate without train.lr_schedule"
            raise ValueError(f"{own} does not read it; it is a setting of {', '.join(others)}")
        return reads.get(str(info.field_name)) if value is None else value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        total, decay = self.steps * self.num_minibatches, self.num_decay_updates
        if self.lr_schedule == "warmup_stable_decay" and self.warmup_steps + decay > total:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and lr_decay_steps {decay}, together more than the {total} "
                "updates of the run (steps times num_minibatches)"
            )
        return self

    @property
    def rate_falls(self) -> bool:
        """True if the learning rate depends on how many updates the run has."""
        if self.lr_schedule is None:
            return self.lr_final_frac != 1
        return self.lr_schedule not in ("constant", "constant_with_warmup")

    @property
    def num_decay_updates(self) -> int:
        """The optimizer updates at the end over which `warmup_stable_decay` falls."""
        total = self.steps * self.num_minibatches
        return self.lr_decay_steps or min(total, max(2, total // 10))

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        lora = self.lora.settings()
        if lora is None:
            return self
        if self.freeze:
            raise ValueError(
                f"freeze names {self.freeze[0]}, and lora freezes all weights; leave freeze out, and name in "
                "lora.targets the parts to train"
            )
        if others := self.part_lr.keys() - lora.parts:
            raise ValueError(f"part_lr names {min(others)}, in which lora.targets has no layer; leave it out")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if both := self.part_lr.keys() & {*self.freeze}:
            raise ValueError(f"part_lr and freeze both name {min(both)}, and a frozen part has no learning rate")
        return self
