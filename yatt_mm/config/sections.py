"""The sections of a run's configuration: every key, its type, its default and what it means."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from models.recipes.media_recipes import VideoSampling
from yatt_mm.config.judge_section import JudgeSection
from yatt_mm.config.values import Count, Seconds, Section, Size
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.published import Carrier


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
    judge, and training has all of them afterwards; every device has an engine of both, one of them asleep."""
    pin_cores: bool = False
    """Without GPUs: True keeps the engines and ranks of every device on a processor core of its own."""
    rollout_devices: Count | None = None
    """Partial colocation: devices that answer in the first step, and without `dynamic` in all; by default half, or what
    the minima below leave. These and the two below count whole engines: multiples of the largest engine's devices."""
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
    """vLLM engines; no two share a device. In partial colocation there are as many as the devices hold."""
    tp: Count = 1
    """Devices of each engine, over which its tensors are cut (tensor parallelism)."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples per prompt, which GRPO compares with each other."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Of training rollouts; evaluation is greedy. vLLM takes up to 2."""
    max_tokens: Count = 256
    """Longest response, in tokens, the end-of-turn token included."""
    max_model_len: Count = 4096
    """Longest prompt and response together, media expanded."""
    max_num_seqs: Count = 256
    """Sequences that an engine works on at the same time."""
    kv_cache_memory: Size = 2**30
    """Memory of each engine's key-value cache, on each of its devices."""
    max_groups_per_engine: Count | None = None
    """Prompts that an engine is given at once; the others wait for the first engine that has room. By default as many
    as `max_num_seqs` holds. In partial colocation an engine is reckoned full with so many."""
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
    """Reward models by name, generative ones and classifiers; each adds its weighted score to the reward."""

    @field_validator("judges")
    @classmethod
    def _check_names(cls, judges: dict[str, JudgeSection]) -> dict[str, JudgeSection]:
        for name in judges.keys() & {*Role}:
            raise ValueError(f"a judge is called {name}, as a role is; call it something else")
        return judges


class AlgorithmSection(Section):
    normalize_std: bool = True
    """True divides advantages by the group's standard deviation (GRPO); False only centres them (Dr. GRPO)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 0.2
    """The probability ratio counts up to 1 + clip_high; `.inf` sets no limit."""
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
    """Prompts under way per group that the batch still lacks: above 1 it is full without waiting for the slowest. Not
    with `rollout.deterministic`."""
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
    clip_grad: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Largest norm of the global gradient; `.inf` sets no limit."""
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
    carrier: Carrier = "auto"
    """How trained weights reach the engines: a segment in shared memory, CUDA IPC between roles that share GPUs, or a
    broadcast over NCCL (gloo on the CPU), which needs neither; auto takes CUDA IPC on GPUs in full colocation, and else
    shared memory."""


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
