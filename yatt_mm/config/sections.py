"""The sections of a run's configuration: every key with its type, its default and its meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from yatt_mm.config.judge_section import JudgeSection
from yatt_mm.config.values import Count, Seconds, Section, Size
from yatt_mm.config.wanted import JUDGE_NAME, NAME
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.published import Carrier

NUM_SAMPLED_PROMPTS = 4
"""The number of prompts of a step or an evaluation of which `rollouts.keep=sample` keeps the responses."""


class RunSection(Section):
    name: Annotated[str, Field(pattern=NAME)]
    """The folder of the run's results inside `dir`."""
    dir: str = "runs"
    """The folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of everything that is drawn at random."""


class ModelSection(Section):
    path: str
    """A Hugging Face folder: config.json, safetensors, tokenizer, processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of weights and activations, in engines and trainers; optimizer states are float32."""


class DataplaneSection(Section):
    uri: str | None = None
    """The address of a running node (`grpc://127.0.0.1:4815`); without it the run starts its own."""
    memory: Annotated[Size, Field(ge=2**20)] = 2**30
    """The byte budget of the embedded node, 1 MiB at least."""
    num_workers: Count = 1
    """The processes of the embedded node that decode media and make patches."""
    index_dir: str | None = None
    """The embedded node keeps the indices of tars in this folder, so that later runs need not read all their headers:
    for sets of a million samples and more."""
    spill_dir: str | None = None
    """The embedded node writes to a folder of its own inside this one: rollouts, which must survive its death, and
    objects that have no room in memory. Without it, they go to the run's temporary files. The folder is removed at
    the end."""
    spill_size: Size = 10 * 2**30
    """The byte budget of the files there."""
    timeout_s: Seconds = 120.0
    """The longest time that one call of a controller, a reward worker or a training rank to the data plane may take."""


class RaySection(Section):
    address: str | None = None
    """An existing cluster (`auto` or host:port); without it the run starts Ray on this machine."""
    env: dict[str, str] = {}
    """Variables of the environment for all engines and training ranks, such as `{NCCL_IB_HCA: mlx5}`."""


class PlacementSection(Section):
    num_devices: Count = 2
    """The number of GPUs, or on a machine without any, of CPU slots."""
    devices_per_host: Count | None = None
    """The devices that the run takes on each host of the cluster `ray.address`, a divisor of `num_devices`. Without it
    all devices are on the machine where the run is started. See docs/clusters.md."""
    mode: Literal["full_colocation", "partial_colocation"] = "full_colocation"
    """Full colocation: every role uses every device, in turns. Partial colocation: some devices sample responses while
    the others judge, and training has all of them afterwards; every device has an engine of both roles, and one of
    them is asleep."""
    pin_cores: bool = False
    """Without GPUs: True keeps the engines and ranks of every device on its own processor core."""
    rollout_devices: Count | None = None
    """Partial colocation: the devices that sample responses in the first step, and without `dynamic` in all steps; by
    default half, or what the minima below leave. These and the two below count whole engines: multiples of the
    largest engine's devices."""
    dynamic: bool = True
    """Partial colocation: True moves devices between rollout and judges, between steps and inside the generation phase,
    toward the role that makes the other wait; `placement.jsonl` says why."""
    min_rollout_devices: Annotated[int, Field(ge=0)] = 0
    """The devices that rollout keeps during the whole generation phase."""
    min_genrm_devices: Annotated[int, Field(ge=0)] = 0
    """The devices that judges keep during the whole generation phase."""
    min_gain_frac: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """The share of the predicted time that another division must save before devices move between steps."""
    decide_every_s: Seconds = 0.5
    """The time between decisions inside a generation phase."""

    @property
    def num_hosts(self) -> int:
        """The hosts that have devices of the run."""
        return self.num_devices // (self.devices_per_host or self.num_devices)


class ControllersSection(Section):
    num: Count = 2
    """The number of parallel controllers; independent of the data-parallel size."""
    deadline_s: Seconds = 300.0
    """The longest time in which what a controller waits for may finish nothing: another controller, an engine, a
    training rank. Then the phase ends with an error."""


class RolloutSection(Section):
    num_engines: Count | None = None
    """The number of vLLM engines; no two share a device. By default, and in partial colocation, there are as many as
    the devices hold."""
    tp: Count = 1
    """The devices of each engine, over which its tensors are cut (tensor parallelism)."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt, which GRPO compares with each other."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """The temperature of training rollouts, up to 2 as in vLLM; evaluation has its own."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, such as `["</answer>"]`, in training and evaluation; the response keeps the text."""
    max_tokens: Count = 256
    """The longest response, in tokens, the end-of-turn token included."""
    max_model_len: Count = 4096
    """The longest prompt and response together, in tokens, media expanded."""
    max_num_seqs: Count = 256
    """The sequences that an engine works on at the same time."""
    kv_cache_memory: Size = 2**30
    """The memory of each engine's key-value cache, on each of its devices."""
    max_groups_per_engine: Count | None = None
    """The prompts that an engine gets at once; the others wait for the first engine that has room. By default as many
    as `max_num_seqs` holds. In partial colocation an engine with this many prompts counts as full."""
    max_images_per_prompt: Count = 4
    """A prompt with more images is refused."""
    max_videos_per_prompt: Annotated[int, Field(ge=0)] = 1
    """A prompt with more videos is refused."""
    deterministic: bool = False
    """True gives each engine the prompts of a step as one batch: the same numbers for the same seed."""


class RewardSection(Section):
    function: str | None = None
    """`module:name` or `path/to/file.py:name` of a function (response: str, answer: str, fields: dict) -> float; see
    docs/own-reward.md for what else it may take and return. By default the one that fits the layout of the set; the
    start names it."""
    range: tuple[float, float] | None = None
    """The lowest and the highest reward that can be right, such as `[0, 1]`; a step with another one is skipped. By
    default all finite rewards are."""
    part_weights: dict[str, float] = {}
    """The weights of the named parts that a function returns, for example `{format: 0.5}`; 1 for parts that are not
    named here."""
    part_ranges: dict[str, tuple[float, float]] = {}
    """The lowest and the highest value that counts of the named parts that a function returns, for example
    `{length: [-1, 0]}`, before their weights; parts that are not named here count as they are."""
    num_workers: Count = 1
    """The number of reward processes; of several hosts each has one at least."""
    deadline_s: Seconds = 60.0
    """The longest time that the function may take for one response before it is interrupted and scored 0; for a batch,
    and for all responses of an async function, as many times this, up to a third of `controllers.deadline_s`."""
    max_error_frac: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The run ends when the function fails on this share of a step's responses, or of the held-out ones: raises, is
    late, or gives no finite number."""
    max_failed_frac: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The run ends when a judge gives no verdict on more than this share of a step's responses; 1 never ends it."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """The weight of the function's score in the reward; 0 leaves the reward to the judges, and the function to
    evaluation."""
    judges: dict[Annotated[str, Field(pattern=JUDGE_NAME)], JudgeSection] = {}
    """Reward models by name, generative ones and classifiers; each adds its weighted score to the reward."""

    @field_validator("part_ranges")
    @classmethod
    def _check_ranges(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in ranges.items():
            if low > high:
                raise ValueError(
                    f"the range of {name} begins at {low:g} and ends at {high:g}; write the lower one first"
                )
        return ranges

    @field_validator("judges")
    @classmethod
    def _check_names(cls, judges: dict[str, JudgeSection]) -> dict[str, JudgeSection]:
        for name in judges.keys() & {*Role}:
            raise ValueError(f"a judge is called {name}, as a role is; call it something else")
        return judges


class RolloutsSection(Section):
    keep: Literal["none", "sample", "all"] = "sample"
    """Which responses are written to `rollouts/step_<n>.parquet` of the run's folder, with rewards and small pictures:
    none, those to a few prompts of every step and evaluation, or all. `python -m yatt_mm.samples` shows them."""

    def keeps(self, position: int, among: int) -> bool:
        """Return True if the responses to the prompt at this position are kept; `among` is the number of prompts of the
        step or evaluation. Every process gives the same reply."""
        if self.keep == "sample":
            return position % -(-among // NUM_SAMPLED_PROMPTS) == 0
        return self.keep == "all"


class SamplingSection(Section):
    replace_groups: bool = False
    """True replaces groups whose rewards are all equal, which teach nothing, by groups of other prompts until the batch
    is full (DAPO's dynamic sampling)."""
    max_prompts_factor: Annotated[float, Field(ge=1)] = 4.0
    """The most prompts that a step may use, as a multiple of `train.prompts_per_step`; groups without signal then fill
    the rest of the batch."""
    over_dispatch: Annotated[float, Field(ge=1)] = 1.0
    """Prompts in flight per group that the batch still needs: above 1 it is full without waiting for the slowest. Not
    with `rollout.deterministic`."""
    tail: Literal["drop", "restart", "continue"] = "drop"
    """What happens to prompts in flight when the batch is full: they are dropped, sampled anew in the next step
    (`restart`), or continued there from their tokens so far (`continue`), each token with the policy version that
    sampled it."""


class WeightsSection(Section):
    carrier: Carrier = "auto"
    """How trained weights travel to the engines: a segment in shared memory, CUDA IPC between roles that share GPUs, or
    a broadcast over NCCL (gloo on the CPU), which needs neither; auto takes CUDA IPC on GPUs in full colocation, and
    otherwise shared memory."""


class FaultsSection(Section):
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """The most faults in a row, without a finished step between them, after which lost parts of the run are made again;
    one more ends the run. 0 ends it at the first."""
    shrink: bool = False
    """True lets a run over several hosts start, and go on from its newest checkpoint, with fewer of them if not all are
    there, as many as divide its layout, its engines and its judges; it uses the others too when they are back."""
    start_deadline_s: Seconds = 600.0
    """The longest time in which engines and training ranks may start."""
    update_deadline_s: Seconds = 3600.0
    """The longest time of the update of one step. Ranks that finish no microbatch in `controllers.deadline_s` are given
    up earlier; this holds for saving and exporting too."""
    save_deadline_s: Seconds = 3600.0
    """The longest time in which the training ranks may finish a checkpoint."""
    export_deadline_s: Seconds = 3600.0
    """The longest time in which a model may be written as a Hugging Face folder."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 3
    """The most steps in a row that may be skipped, because their loss or gradient was not finite or a reward was out of
    `reward.range`; one more ends the run."""


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """The steps between checkpoints; 0 saves only at the end, and when the run is told to stop."""
    keep: Count = 2
    """The number of newest checkpoints that stay on disk."""
    at: Literal["step", "phase"] = "step"
    """`phase` also saves a step's responses with their rewards before they are trained on, without the weights, so that
    a run whose machine is lost later in the step does not sample and judge them again."""
    asynchronous: bool = True
    """True copies the training state to host memory and writes it while training continues; the checkpoint counts as
    soon as it is written."""
    dir: str | None = None
    """A folder for the checkpoints, which several runs may share; `checkpoints` in the run's folder is then a link to
    the run's folder in it. None keeps them in the run's folder."""
    copy_to: str | None = None
    """A URL of fsspec, such as `s3://bucket/run7`, or a folder, to which committed checkpoints are copied while the run
    goes on. The copies are read back and compared, and none is removed there."""
