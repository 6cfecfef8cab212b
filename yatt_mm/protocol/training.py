"""The messages between controllers and training ranks, without the plans. Imported in controllers: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.common.reference_folders import ReferenceFolders
from yatt_mm.protocol.adam_settings import AdamSettings

if TYPE_CHECKING:
    import numpy as np

    from models.freeze import Part
    from models.layout.parallel_settings import Recompute
    from models.lora.settings import LoraSettings
    from yatt_mm.protocol.published import Carrier


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """The settings of the critic that are not those of the policy."""

    model_dir: str
    """The folder of the model from which it begins."""
    optim: AdamSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The settings of a training rank."""

    model_dir: str
    dtype: str
    optim: AdamSettings
    temperature: float
    algorithm: AlgorithmSettings
    seed: int
    timeout_s: float
    recompute: Recompute
    freeze: tuple[Part, ...]
    """The parts of the model that are not trained."""
    overlap_grad_reduce: bool
    """True sums gradients over replicas during the backward pass."""
    carrier: Carrier
    """How weights travel to the engines."""
    num_receivers: int
    """The number of engine processes that receive a model, where the weights are sent."""
    deadline_s: float
    """The deadline of every wait for them, in seconds."""
    references: ReferenceFolders | None
    """The folders of the reference models; None if nothing reads them."""
    skipped_dir: str
    """The folder for what skipped updates were computed from."""
    critic: CriticSpec | None = None
    """None for an algorithm without a critic."""
    lora: LoraSettings | None = None
    """The adapters that are trained; None trains the weights."""
    node_id: str = ""
    """The id of the data-plane node on the rank's host; empty in a run on one host, where nothing is sent to others."""
    cores: tuple[int, ...] = ()
    """The processor cores of the rank; none leaves the choice to the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedMemory:
    """The bytes that one change of a rank's state released on its device, or restored there."""

    released_bytes: int = 0
    restored_bytes: int = 0
    release_s: float = 0.0
    restore_s: float = 0.0

    def __add__(self, other: MovedMemory) -> MovedMemory:
        """Return what two models of a rank moved, one after the other."""
        return MovedMemory(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(slots=True, kw_only=True)
class UpdateReport:
    """The report of one rank about one step."""

    is_loss_rank: bool
    """True on one rank per data-parallel replica: only its numbers count."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """This rank's parts of global sums; the sum over the replicas is the metric."""
    grad_norm: float = 0.0
    """The norm of the global gradient before clipping, averaged over the step's updates."""
    critic_metrics: dict[str, float] = field(default_factory=dict)
    """The parts of global sums of the critic, like `loss_metrics`."""
    critic_values: dict[str, float] = field(default_factory=dict)
    """Values of the critic over all replicas, the same on every rank of the last pipeline stage."""
    num_skipped: int = 0
    """The number of updates, of the policy or of the critic, that were skipped. No other value counts them."""
    difference_sum: float = 0.0
    difference_max: float = 0.0
    num_compared: int = 0
    """The number of tokens over which engine and trainer were compared: those sampled with the weights at the start of
    the step."""
    num_stale: int = 0
    """The number of trained tokens that an older policy sampled."""
    resolved_bytes: int = 0
    """The bytes of patches that this rank resolved."""
    far_bytes: int | None = None
    """Those of them whose home is the node of another host of the run, each once; None in a run on one host."""
    seconds: float = 0.0

    def add_minibatch(self, loss_metrics: dict[str, float], grad_norm: float, num_minibatches: int) -> None:
        """Add the values of one minibatch; all values are averaged over the `num_minibatches` of the step."""
        for name, value in loss_metrics.items():
            self.loss_metrics[name] = self.loss_metrics.get(name, 0.0) + value / num_minibatches
        self.grad_norm += grad_norm / num_minibatches

    def add_critic(self, loss_metrics: dict[str, float], grad_norm: float, num_minibatches: int) -> None:
        """Add the values of one update of the critic in the same way."""
        for name, value in loss_metrics.items():
            self.critic_metrics[name] = self.critic_metrics.get(name, 0.0) + value / num_minibatches
        self.critic_values["grad_norm"] = self.critic_values.get("grad_norm", 0.0) + grad_norm / num_minibatches

    def add_difference(self, differences: np.ndarray, *, num_stale: int) -> None:
        """Add |engine - trainer| log-probabilities of one sample's tokens that are not stale, and the number of stale
        ones."""
        self.num_stale += num_stale
        if len(differences):
            self.difference_sum += float(differences.sum())
            self.difference_max = max(self.difference_max, float(differences.max()))
            self.num_compared += len(differences)
