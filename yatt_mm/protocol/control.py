"""What a controller is given at its start, and the values that travel between its verbs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataplane.core.refs import Ref
from models.flops import Operations
from models.layout.parallel import Parallel
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.protocol.placement_model import Placement
from yatt_mm.protocol.rollout import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One prompt of the run, as drawn."""

    position: int
    """How many prompts had been drawn before it; its identity within the run."""
    epoch: int
    index: int
    """Sample number within the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question with its media, ready to be answered."""

    slot: Slot
    question: str
    answer: str
    fields: Mapping[str, Any]
    media: tuple[Ref, ...]
    """Derived refs (uint8 patches), in the order in which they stand in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A prompt's finished answers and their rewards."""

    prompt: Prompt
    group: GroupRef
    rewards: tuple[float, ...]
    """[G]"""
    num_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Where the controllers begin."""

    step: int
    """Steps done."""
    checkpoint: str | None
    """Folder of the training ranks' state to load, or None for a fresh run."""
    train_set: str
    """Name of the training set at the data plane."""
    eval_set: str
    num_train: int
    num_eval: int
    flaws: tuple[Mapping[str, Any], ...] = ()
    """Notices of what was already unusable when the shards were indexed (torn shards, members that cannot be read)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The actors of a run, as handles, and what everybody must agree on."""

    rendezvous: Any
    coordinator: Any
    engines: tuple[Any, ...]
    reward_workers: tuple[Any, ...]
    judges: Mapping[str, tuple[Any, ...]]
    """Engines of every reward model that is a judge, by its name."""
    ranks: tuple[Any, ...]
    """[world] training ranks in the order of their rank numbers."""
    parallel: Parallel
    operations: Operations
    """What training on the model takes: updates are balanced by it."""
    placement: Placement
    dataplane_uri: str
    recipes: MediaRecipes
    """How the model wants its media made."""
    weights_dir: str
    """Folder in shared memory through which weights are published."""
    checkpoints: Checkpoints
    export_dir: str
    """Where the trained Hugging Face folder goes."""
    restart_count: int
    run_id: str
    """Unlike that of any other run: the names of its objects in a data plane that several runs share begin with it."""

    @property
    def num_replicas(self) -> int:
        """Data-parallel size."""
        return self.parallel.dp

    def ranks_of(self, replica: int) -> list[tuple[str, Any]]:
        """(name, handle) of every rank of a data-parallel replica (Megatron-core's order: tp, cp, dp, pp)."""
        inner = self.parallel.tp * self.parallel.cp
        return [
            (f"training rank {rank}", handle)
            for rank, handle in enumerate(self.ranks)
            if rank // inner % self.parallel.dp == replica
        ]

    def engine_name(self, engine: int) -> str:
        """How errors call an engine."""
        return f"engine {engine}"

    def judge_name(self, judge: str, engine: int) -> str:
        """How errors call an engine of a judge."""
        return f"engine {engine} of judge {judge}"
