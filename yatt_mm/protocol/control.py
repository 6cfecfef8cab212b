"""The start values of a controller, and the values that its methods pass to each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataplane.core.refs import Ref
from models.flops import Operations
from models.layout.parallel import Parallel
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.begun_steps import BegunStep
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.conversation import Conversation
from yatt_mm.common.host_progress import HostProgress
from yatt_mm.common.sample_layouts import Layout
from yatt_mm.protocol.faults import FUNCTION, Failures
from yatt_mm.protocol.placement_model import Placement
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import GroupRef

TRAIN = "train"
"""The name of the training set of a run that has one."""
HELD_OUT = "eval"
"""The name of the held-out set of `data.eval`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One prompt of the run, with its position in the run's order."""

    position: int
    """The number of prompts that were drawn before this one. It identifies the prompt within the run."""
    epoch: int
    index: int
    """The sample number within the data set."""
    set_name: str = TRAIN
    """The name of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation with its media, ready for an engine."""

    slot: Slot
    conversation: Conversation
    """The turns that the policy reads."""
    question: Conversation
    """The sample's own turns, which judges and people read."""
    answer: str
    fields: Mapping[str, Any]
    reward: str
    """The path of the reward function."""
    media: tuple[Ref, ...]
    """Derived refs (uint8 patches), in the order of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A prompt's finished responses and their rewards."""

    prompt: Prompt
    group: GroupRef
    rewards: tuple[float, ...]
    """[G] one reward per response."""
    scores: tuple[Scores, ...] = ()
    """The scores that add up to the rewards: those of the function, then those of each judge."""
    failures: tuple[Failures, ...] = ()
    """Who gave some of the responses no score."""
    advantages: tuple[float, ...] = ()
    """[G] the advantage of each response; empty until the batch of its step is complete."""

    @property
    def parts(self) -> Mapping[str, tuple[float | None, ...]]:
        """[G] by name the parts of the reward function's scores."""
        return self._of_function.parts

    @property
    def answers(self) -> tuple[str | None, ...]:
        """[G] the answers that the reward function read in the responses; empty if it does not say."""
        return self._of_function.answers

    @property
    def votes(self) -> tuple[str, ...]:
        """[G] what each response answers, for a vote."""
        return self._of_function.votes

    @property
    def _of_function(self) -> Scores:
        nothing = Scores(source=FUNCTION, values=())
        return next((scores for scores in self.scores if scores.source == FUNCTION), nothing)

    def num_failed(self, source: str) -> int:
        """Return the number of responses to which this source of scores gave none."""
        return sum(failures.num for failures in self.failures if failures.source == source)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """One data set of a run, as it was found at the start."""

    name: str
    """Its name in the config."""
    dataset: str
    """Its name at the data plane."""
    num_samples: int
    layout: Layout
    """Where its samples have question and answer."""
    reward: str
    """The path of its reward function; that of a file is absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation of a run so far, by the metric `eval.keep_best`."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What the controllers begin with: the step, the checkpoint, and the data sets."""

    step: int
    """The number of finished steps."""
    checkpoint: str | None
    """The folder with the training ranks' state to load, or None if they have theirs."""
    train_sets: tuple[RunSet, ...]
    eval_sets: tuple[RunSet, ...]
    """The held-out sets; their numbers of samples are those of an evaluation."""
    ranks_at: int = 0
    """The step of the ranks' state once the checkpoint is loaded. After a fault it may be before `step` or after it."""
    is_begun: bool = False
    """True if the model of the start was measured."""
    best: Best | None = None
    """The best evaluation before the checkpoint; None for a fresh run, and if it is not kept."""
    kl_coef: float | None = None
    """The weight of the divergence from the reference in the next step; None for a fresh run, and if it is always the
    same."""
    told: frozenset[tuple[str, str, str, str]] = frozenset()
    """(set, shard, key, reason) of the held-out samples of which the run told before the checkpoint that they cannot be
    used."""
    begun: Mapping[int, BegunStep] = field(default_factory=dict)
    """[step] the steps after the checkpoint that were begun before the run was started."""
    flaws: tuple[Mapping[str, Any], ...] = ()
    """Notices of shards and members that could not be indexed (torn shards, members that cannot be read), of which the
    run did not tell before the checkpoint."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """The paths of all reward functions, each once."""
        return tuple(dict.fromkeys(one.reward for one in (*self.train_sets, *self.eval_sets)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The actors of a run, as handles, and the settings that all of them share."""

    rendezvous: Any
    coordinator: Any
    engines: tuple[Any, ...]
    reward_workers: tuple[Any, ...]
    keeper: Any
    """The actor that writes kept rollouts; None if none are kept."""
    judges: Mapping[str, tuple[Any, ...]]
    """The engines of every judge, by the judge's name."""
    ranks: tuple[Any, ...]
    """[world] training ranks in the order of their rank numbers."""
    parallel: Parallel
    operations: Operations
    """Counts the operations of training on a sample, for balancing."""
    placement: Placement
    progress: HostProgress
    """Reads what engines, ranks and the rendezvous have done."""
    dataplane_uri: str
    """The address of the node on a controller's host."""
    nodes: Mapping[str, str]
    """[node id] the addresses of all nodes of a run over several hosts; empty in a run on one."""
    recipes: MediaRecipes
    """The recipes from which the model's media are made."""
    weights_dir: str
    """The folder in shared memory through which weights are published."""
    checkpoints: Checkpoints
    export_dir: str
    """The folder for the trained model in Hugging Face format."""
    best_dir: str
    """The folder for the best model, in the same format."""
    restart_count: int
    """How many times controllers were started anew after a fault."""
    run_id: str
    """A name that no other run has. The names of the run's objects begin with it, because several runs may share a data
    plane."""

    @property
    def num_replicas(self) -> int:
        """The data-parallel size."""
        return self.parallel.dp

    def ranks_of(self, replica: int) -> list[tuple[str, Any]]:
        """Return (name, handle) of every rank of a data-parallel replica (Megatron-core's order: tp, cp, dp, pp)."""
        inner = self.parallel.tp * self.parallel.cp
        return [
            (f"training rank {rank}", handle)
            for rank, handle in enumerate(self.ranks)
            if rank // inner % self.parallel.dp == replica
        ]

    def engine_name(self, engine: int) -> str:
        """Return the name of an engine in errors."""
        return f"engine {engine}"

    def judge_name(self, judge: str, engine: int) -> str:
        """Return the name of a judge's engine in errors."""
        return f"engine {engine} of judge {judge}"
