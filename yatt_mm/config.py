"""The configuration of a run: one YAML file, one tree of typed models, dotted overrides through the same checks.

Nothing heavy is imported here, and nothing is opened: what needs the disk is checked in `yatt_mm.preflight`.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError

from models.media_recipes import VideoSampling
from models.parallel import Parallel
from yatt_mm.config_values import Count, Seconds, Section, Size
from yatt_mm.control.mover import Division
from yatt_mm.errors import ConfigError
from yatt_mm.genrm.section import JudgeSection
from yatt_mm.placement import Placement, full_colocation, partial_colocation
from yatt_mm.placement_policy import Bounds, Split
from yatt_mm.sampling import SamplingRule, Tail


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    """Folder of the run's results inside `dir`."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Everything that is drawn at random follows from it."""


class ModelSection(Section):
    path: str
    """A Hugging Face folder: config.json, safetensors, tokenizer, processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations, in engines and trainers; optimizer states are float32."""


class VideoSection(Section):
    """Which frames of videos are taken, and how large; what is left out, the model's folder says."""

    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Frames per second of video."""
    min_frames: Annotated[int, Field(ge=1, le=16384)] | None = None
    """Fewest frames of a video; of a shorter one, all there are."""
    max_frames: Annotated[int, Field(ge=1, le=16384)] | None = None
    """Most frames; a longer video is sampled more thinly."""
    min_pixels: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Frames are scaled up to it: of each frame (Qwen2.5-VL), or of all frames together (Qwen3-VL)."""
    max_pixels: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Frames are scaled down to it, counted likewise."""

    def sampling(self) -> VideoSampling:
        """The same as those who make recipes take it."""
        return VideoSampling(**self.model_dump())


class DataSection(Section):
    train: str
    """Glob of WebDataset tars, Parquet or JSON lines, or a Hugging Face `datasets` folder; with `dataplane.uri`, the
    name under which its node registered them."""
    eval: str
    """The same for the held-out samples."""
    question_field: str = "question"
    """Where a sample's question is: text, or one chat turn of the user (`prompt` in verl's Parquet)."""
    answer_field: str = "answer"
    """Where its answer is; `a.b` looks into nested fields (`reward_model.ground_truth` in verl's Parquet)."""
    shuffle_answers: bool = False
    """True deals the answers out among the prompts at random: the control in which nothing can be learnt."""
    on_bad_media: Literal["quarantine", "fail"] = "quarantine"
    """What a medium that cannot be read does: set the sample aside and go on, or end the run."""
    num_eval_samples: Annotated[int, Field(ge=0)] = 0
    """Held-out samples per evaluation; 0 takes all of them."""
    video: VideoSection = VideoSection()


class DataplaneSection(Section):
    uri: str | None = None
    """Address of a running node (`grpc://127.0.0.1:4815`); without it the run starts its own."""
    memory: Size = 2**30
    """Byte budget of the embedded node."""
    num_workers: Count = 1
    """Processes that decode media and cut patches in the embedded node."""
    spill_dir: str | None = None
    """Where the embedded node keeps, in a folder of its own, the rollouts that must outlive it if it dies, and what has
    no room in memory; without it, among the run's temporary files. It is removed at the end."""
    spill_size: Size = 10 * 2**30
    """What the files there may take."""
    timeout_s: Seconds = 120.0
    """How long one call of a controller, a reward worker or a training rank to the data plane may take."""


class RaySection(Section):
    address: str | None = None
    """An existing cluster (`auto` or host:port); without it the run starts Ray on this machine."""


class PlacementSection(Section):
    num_devices: Count = 2
    """GPUs, or on a machine without any, CPU slots."""
    mode: Literal["full_colocation", "partial_colocation"] = "full_colocation"
    """Full colocation: every role on every device, in turns. Partial colocation: some devices answer while the others
    judge, and training has all of them afterwards; every device has an engine of both."""
    pin_cores: bool = False
    """Without GPUs: True keeps the engines and ranks of every device on a processor core of its own."""
    rollout_devices: Count | None = None
    """Partial colocation: devices that answer in the first step, and without `dynamic` in all; by default half."""
    dynamic: bool = True
    """Partial colocation: True moves devices between rollout and judges, between steps and inside the generation phase,
    toward the one that holds the other up; `placement.jsonl` says why."""
    min_rollout_devices: Annotated[int, Field(ge=0)] = 0
    """Devices that rollout keeps all through a generation phase."""
    min_genrm_devices: Annotated[int, Field(ge=0)] = 0
    """Devices that judges keep all through a generation phase."""
    min_gain_frac: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of the predicted time that another division must save before devices move between steps."""
    decide_every_s: Seconds = 0.5
    """Time between decisions inside a generation phase."""


class ControllersSection(Section):
    num: Count = 2
    """Parallel controllers; independent of the data-parallel size."""
    deadline_s: Seconds = 300.0
    """How long controllers wait for each other, and for one call to a worker, before the phase is given up."""


class RolloutSection(Section):
    num_engines: Count = 2
    """vLLM engines; at most one a device."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples per prompt, which GRPO compares with each other."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of training rollouts; evaluation is greedy."""
    max_tokens: Count = 256
    """Longest response, in tokens, the end-of-turn token included."""
    max_model_len: Count = 4096
    """Longest prompt and response together, media expanded."""
    max_num_seqs: Count = 256
    """Sequences that an engine works on at the same time."""
    kv_cache_memory: Size = 2**30
    """Memory of each engine's key-value cache."""
    max_groups_per_engine: Count | None = None
    """Prompts that an engine is given at once; the others wait for the first engine that has room. By default as many
    as `max_num_seqs` holds. In partial colocation a device is reckoned full with so many."""
    max_images_per_prompt: Count = 4
    """More images in one prompt are refused."""
    max_videos_per_prompt: Annotated[int, Field(ge=0)] = 1
    """More videos in one prompt are refused."""
    deterministic: bool = False
    """True gives each engine the prompts of a step as one batch: the same numbers for the same seed."""


class RewardSection(Section):
    function: str = "yatt_mm.rewards.functions:exact_match"
    """`module:name` of a function (response: str, answer: str, fields: dict) -> float."""
    num_workers: Count = 1
    """Reward processes."""
    deadline_s: Seconds = 60.0
    """How long the function may take over one response before it is interrupted and scored 0."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the function's score in the reward; 0 leaves the reward to the judges, and the function to evaluation."""
    judges: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], JudgeSection] = {}
    """Generative reward models by name; each adds its weighted score to the reward."""


class AlgorithmSection(Section):
    normalize_std: bool = True
    """True divides advantages by the group's standard deviation (GRPO); False only centres them (Dr. GRPO)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The probability ratio counts up to 1 + clip_high."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus in the loss."""


class SamplingSection(Section):
    replace_groups: bool = False
    """True replaces groups whose rewards are all equal, which teach nothing, by other prompts' until the batch is full
    (DAPO's dynamic sampling)."""
    max_prompts_factor: Annotated[float, Field(ge=1)] = 4.0
    """Most prompts that a step may use, as a multiple of `train.prompts_per_step`; what the batch then still lacks is
    filled with groups without signal."""
    over_dispatch: Annotated[float, Field(ge=1)] = 1.0
    """Prompts under way per group that the batch still lacks: above 1 it is full without waiting for the slowest. Needs
    rewards that come while others are answered: no judges, or partial colocation; and not `rollout.deterministic`."""
    tail: Literal["drop", "restart", "continue"] = "drop"
    """What becomes of prompts under way when the batch is full: dropped, answered anew in the next step (`restart`), or
    gone on with there from where they were (`continue`), each token with the policy version that it was sampled by."""


class ParallelSection(Section):
    tp: Count = 1
    """Tensor-parallel ranks."""
    pp: Count = 1
    """Pipeline stages."""
    vpp: Count = 1
    """Runs of layers per pipeline stage (virtual pipeline); above 1 the stages wait less for each other."""
    first_stage_layers: Count | None = None
    """Layers of the first stage, which has the vision tower too; by default all stages have the same number."""
    last_stage_layers: Count | None = None
    """Layers of the last stage, which has the head too; by default all stages have the same number."""
    sp: bool = False
    """True cuts norms and residuals over the tensor-parallel ranks as well (sequence parallelism)."""
    cp: Count = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    cp_comm: Literal["a2a", "allgather"] = "a2a"
    """How they attend to each other's tokens: exchange heads for tokens, or gather all keys and values."""
    cp_order: Literal["contiguous", "zigzag"] = "contiguous"
    """Which tokens a rank holds: a slice of the packed stream, or of each sequence a piece from both of its ends."""
    ep: Count = 1
    """Ranks of a stage over which the experts of a layer are dealt, across replicas; 1 for models without experts."""
    etp: Count = 1
    """Ranks over which each expert's matrices are cut; 1 for models without experts."""
    dp: Count | None = None
    """Data-parallel replicas; by default the devices that tp, pp and cp leave."""


class TrainSection(Section):
    steps: Count
    """Training steps of the run."""
    prompts_per_step: Count
    """Prompts drawn per step, over all controllers."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates over which the learning rate rises from 0."""
    lr_final_frac: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of `lr` that is left at the last step; it falls linearly. 1 keeps it constant."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW; biases and norms are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the global gradient."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer's state that stays, and is updated, in host memory. Needs a GPU."""
    num_minibatches: Count = 1
    """Optimizer updates per step; above 1 the later ones are off-policy and the clip matters."""
    max_tokens_per_microbatch: Count = 8192
    """Tokens, images expanded, that one forward pass may hold."""
    max_patches_per_microbatch: Count | None = None
    """Image patches that one forward pass may encode; by default what the images of its tokens have."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations computed again in the backward pass to save memory: none, whole layers, or attention alone."""
    freeze: Annotated[list[Literal["tower", "merger", "language"]], Field(max_length=2)] = []
    """Parts that are not trained, two at most: the vision tower, its merger (which makes tokens of patches), the
    language model."""
    overlap_grad_reduce: bool = False
    """True sums gradients over replicas while the backward pass goes on; pays with many replicas on GPUs."""
    parallel: ParallelSection = ParallelSection()


class WeightsSection(Section):
    carrier: Literal["auto", "shm", "cuda_ipc", "nccl"] = "auto"
    """How trained weights reach the engines: a segment in shared memory, CUDA IPC between roles that share GPUs, or a
    broadcast over NCCL (gloo on the CPU), which needs neither; auto takes CUDA IPC on GPUs and else shared memory."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates only before and after training."""


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Count = 2
    """Newest checkpoints that stay on disk."""
    asynchronous: bool = True
    """True copies the training state to host memory and writes it during the next step; it counts after that step."""


class Config(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    dataplane: DataplaneSection = DataplaneSection()
    ray: RaySection = RaySection()
    placement: PlacementSection = PlacementSection()
    controllers: ControllersSection = ControllersSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    sampling: SamplingSection = SamplingSection()
    train: TrainSection
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def run_dir(self) -> Path:
        """Where everything that the run writes goes."""
        return Path(self.run.dir) / self.run.name

    def sampling_rule(self) -> SamplingRule:
        """How a step's batch is filled."""
        num_groups = self.train.prompts_per_step
        return SamplingRule(
            num_groups=num_groups,
            replaces_groups=self.sampling.replace_groups,
            max_prompts=math.ceil(num_groups * self.sampling.max_prompts_factor),
            over_dispatch=self.sampling.over_dispatch,
            tail=Tail(self.sampling.tail),
            deterministic=self.rollout.deterministic,
        )

    @property
    def is_partial(self) -> bool:
        """Rollout and judges have devices of their own while prompts are answered."""
        return self.placement.mode == "partial_colocation"

    @property
    def takes_rounds(self) -> bool:
        """All prompts wait for all: for the same numbers every time, or because judges work when engines sleep."""
        return self.rollout.deterministic or (bool(self.reward.judges) and not self.is_partial)

    def make_placement(self) -> Placement:
        """Which unit uses which device."""
        num_devices, judges = self.placement.num_devices, self.reward.judges
        if self.is_partial:
            return partial_colocation(num_devices=num_devices, judges=judges)
        return full_colocation(
            num_devices=num_devices,
            num_engines=self.rollout.num_engines,
            num_judge_engines={name: judge.num_engines for name, judge in judges.items() if judge.url is None},
            num_judge_actors={name: judge.num_engines for name, judge in judges.items() if judge.url is not None},
        )

    def division(self) -> Division | None:
        """How devices may be divided in partial colocation; None without it."""
        section = self.placement
        if not self.is_partial:
            return None
        num = section.num_devices
        num_rollout = section.rollout_devices or (num + 1) // 2
        return Division(
            first=Split(rollout=num_rollout, genrm=num - num_rollout),
            bounds=Bounds(
                min_rollout=section.min_rollout_devices,
                max_rollout=num - section.min_genrm_devices,
                min_genrm=section.min_genrm_devices,
                max_genrm=num - section.min_rollout_devices,
                min_gain_frac=section.min_gain_frac,
            ),
            is_dynamic=section.dynamic,
            decide_every_s=section.decide_every_s,
        )

    def requests_per_engine(self) -> dict[str, int]:
        """[pool of engines] groups that an engine is given at once."""
        rollout, size = self.rollout, self.rollout.group_size
        rooms = {"rollout": rollout.max_groups_per_engine or max(1, rollout.max_num_seqs // size)}
        for name, judge in self.reward.judges.items():
            num_seqs = size * judge.num_votes
            rooms[name] = judge.max_groups_per_engine or max(1, judge.max_num_seqs // num_seqs)
        return rooms

    def parallel(self) -> Parallel:
        """The layout of the training ranks, with `dp` filled in from the devices.

        Raises:
            ConfigError: the devices do not divide into that layout.
        """
        wanted, devices = self.train.parallel, self.placement.num_devices
        model_ranks = wanted.tp * wanted.pp * wanted.cp
        dp = wanted.dp if wanted.dp is not None else max(1, devices // model_ranks)
        if model_ranks * dp != devices:
            raise ConfigError(
                f"train.parallel asks for tp {wanted.tp} x pp {wanted.pp} x cp {wanted.cp} x dp {dp} = "
                f"{model_ranks * dp} ranks, but placement.num_devices is {devices}; make the product equal to "
                "the devices (dp may be left out)"
            )
        return Parallel(**{**wanted.model_dump(), "dp": dp})


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, check everything.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    try:
        return Config.model_validate(read_tree(path, overrides))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, Config) for problem in error.errors())) from error


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain tree of a YAML file, with `dotted.key=value` overrides put in.

    Raises:
        ConfigError: the file cannot be read or is not a mapping, or an override is not one.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; wanted a mapping of sections")
    for override in overrides:
        _apply_override(tree, override)
    return tree


def dump_config(config: Config) -> str:
    """The resolved config as YAML; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"found the argument {override!r}; wanted dotted.key=value, such as train.lr=1e-4")
    *sections, leaf = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {section} is a value, not a section")
        tree = below
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is not a YAML value: {error}") from error


def explain(problem: Any, root: type[Section]) -> str:
    """One line on a validation error of pydantic's, with the key and the nearest known one."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _all_keys(root)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == location[-1]]
        return f"{key} is not a known key; did you mean {(same_leaf or near)[0]}?"
    if problem["type"] == "missing":
        return f"{key} is missing; add it to the config or give {key}=VALUE"
    if not location:
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{key} is {problem['input']!r}: {problem['msg']}"


def section_inside(annotation: Any) -> tuple[type[Section], str] | None:
    """The section that a field holds, itself or by name, and what stands between its key and theirs; else None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "."
    inside = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Section)]
    return (inside[0], ".<name>.") if inside else None


def _all_keys(section: type[Section], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        if (found := section_inside(field.annotation)) is not None:
            keys += _all_keys(found[0], f"{prefix}{name}{found[1]}")
    return keys
