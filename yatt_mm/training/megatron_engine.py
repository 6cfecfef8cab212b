"""The policy or its critic on one training rank: log-probabilities or values, optimizer updates, export of weights,
checkpoints.

A thin layer over megatron: it packs samples, runs megatron's pipeline schedule, and applies a loss that the caller
gives. It knows nothing of Ray, vLLM or the data plane. Every method is collective: all ranks of the world call it, with
the same microbatches on all ranks of one replica (pixels on its first pipeline stage only).

In shapes, K is the number of sampled tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from models.build import build
from models.compat.megatron_core import get_forward_backward_func, parallel_state
from models.freeze import Part
from models.layout.context_parallel import ContextParallel
from models.layout.parallel import Parallel, check_layout
from models.layout.parallel_settings import Recompute
from models.lora.peft_folder import peft_writer
from models.lora.settings import LoraSettings
from models.registry import read_config
from models.sequence.context_share import cut
from models.sequence.distinct_media import own_media
from models.sequence.packing import PackedBatch, pack
from models.vlm import Scores
from models.weights.checkpoint_files import CheckpointFiles
from models.weights.export import ShardedWeights
from models.weights.load import check_finite, check_names
from yatt_mm.common.progress import PROGRESS
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training import rank_checkpoint
from yatt_mm.training.distributed import device, init_model_parallel
from yatt_mm.training.learning_rate import learning_rate
from yatt_mm.training.loss_columns import loss_inputs
from yatt_mm.training.offload import EVERYTHING, Holding, TrainMemory
from yatt_mm.training.optimizer import build_optimizer, wrap
from yatt_mm.training.rank_checkpoint import TrainState
from yatt_mm.training.train_sample import TrainSample

Metrics = Mapping[str, torch.Tensor]
LossFunction = Callable[..., tuple[torch.Tensor, Metrics]]
"""The type of a loss: (log-probabilities [K], entropies [K], `LossInputs`) -> (loss, metrics). That of a critic takes
(values [K], `LossInputs`). Both results are sums over tokens. The tokens' weights already count all replicas, so
nothing is divided afterwards."""
Microbatches = Sequence[Sequence[TrainSample]]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATES: dict[Scores, str] = {"logprobs": "", "values": "critic/"}
"""[what is scored] the beginning of the names of the tensors in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one update."""

    loss_metrics: dict[str, float]
    """The sums over this rank's microbatches; empty if this rank is not on the last pipeline stage."""
    grad_norm: float
    """The norm of the global gradient, before clipping; NaN if the update was skipped."""
    was_skipped: bool
    """True if the loss or the gradient of some rank is not finite: weights and optimizer are as before."""
    logprobs: list[list[np.ndarray]]
    """[microbatch][sample] float32 [sampled tokens], under the weights before the update; empty like the metrics. Those
    of a critic are values."""


@dataclass(slots=True)
class _Scored:
    """The log-probabilities, or values, and loss metrics of one microbatch, which the last pipeline stage keeps."""

    scores: torch.Tensor
    num_scored: tuple[int, ...]
    metrics: Metrics = field(default_factory=dict)

    def by_sample(self) -> list[np.ndarray]:
        return [part.numpy() for part in self.scores.cpu().split(list(self.num_scored))]


class TrainEngine:
    """One rank's part of the policy, or of its critic, and its optimizer."""

    def __init__(
        self,
        *,
        model_dir: Path,
        parallel: Parallel,
        optim: AdamSettings,
        dtype: str = "float32",
        seed: int,
        recompute: Recompute = "none",
        freeze: Collection[Part] = (),
        overlap_grad_reduce: bool = False,
        scores: Scores = "logprobs",
        lora: LoraSettings | None = None,
    ) -> None:
        """Load the model of a Hugging Face folder. torch.distributed must be initialised with all ranks. An engine that
        scores `values`, a critic, is made after that of the policy, in whose parallel groups it works."""
        check_layout(parallel, read_config(model_dir))
        if scores == "logprobs":
            init_model_parallel(parallel, seed)
        self._device = device()
        built = build(
            model_dir,
            parallel,
            DTYPES[dtype],
            self._device,
            recompute=recompute,
            frozen=freeze,
            # replicas that share experts must all have a backward pass, also for text alone
            tower_always_runs=overlap_grad_reduce or (parallel.ep > 1 and not _trains_language(freeze, lora)),
            scores=scores,
            lora=lora,
            seed=seed,
        )
        self._state_name = STATES[scores]
        self._model, self._files, self._layout = built.model, built.files, built.layout
        self._weights, self._table, self._adapters = built.weights, built.table, built.adapters
        self._lr_at = learning_rate(optim)
        self._context = ContextParallel(
            size=parallel.cp,
            rank=parallel_state.get_context_parallel_rank(),
            order=parallel.cp_order,
            comm=parallel.cp_comm,
        )
        self._multiple_of = self._context.stream_multiple(parallel.tp if parallel.sequence_parallel else 1)
        self._microbatch_multiple = parallel.pp if parallel.vpp > 1 else 1
        self._ddp = wrap(self._model, overlap_grad_reduce=overlap_grad_reduce)
        self._optimizer = build_optimizer(self._ddp, optim, DTYPES[dtype])
        self.memory = TrainMemory(self._ddp, self._optimizer)
        """Which parts of this rank's state are on its device. Work without the parts that it needs is refused."""
        self._num_updates = 0
        self._pending_save: rank_checkpoint.PendingSave | None = None
        self.needs_pixels: bool = parallel_state.is_pipeline_first_stage()
        """True on ranks that need patches, of the media that `own_media` names."""
        self._is_last_stage: bool = parallel_state.is_pipeline_last_stage()
        encoders = parallel_state.get_tensor_and_context_parallel_group()
        self.is_loss_rank: bool = self._is_last_stage and encoders.rank() == 0
        """True on one rank of each replica: its metrics and log-probabilities count."""

    @torch.no_grad()
    def logprobs(self, microbatches: Microbatches, *, temperature: float = 1.0) -> list[list[np.ndarray]]:
        """Return [microbatch][sample] float32 [sampled tokens]; empty on ranks that are not on the last stage."""
        self.memory.require([Holding.WEIGHTS], "compute log-probabilities")
        return [scored.by_sample() for scored in self._run(microbatches, temperature, None)]

    def values(self, microbatches: Microbatches) -> list[list[np.ndarray]]:
        """Return a critic's values of the states before the sampled tokens, in the form of `logprobs`."""
        return self.logprobs(microbatches)

    @contextmanager
    def weights_of(self, files: CheckpointFiles) -> Iterator[None]:
        """Compute with the weights of another checkpoint of the same architecture in a `with` block. They take the
        place of the trained ones, which wait in host memory and come back bit for bit. With LoRA the weights of the
        folder that the model came from are there already, and its adapters do nothing for the block."""
        is_base = self._adapters is not None and files.model_dir.resolve() == self._files.model_dir.resolve()
        without_adapters = self._adapters.off() if self._adapters else nullcontext()
        with without_adapters, nullcontext() if is_base else self.memory.lent():
            spoilt: list[str] = []
            for chunk in () if is_base else self._model:
                spoilt += self._table.load(chunk, files)
                PROGRESS.tick()
            check_finite(spoilt, files)
            yield

    def check_names(self, files: CheckpointFiles) -> None:
        """Raise ValueError, on all ranks, unless another checkpoint has the tensors of this model."""
        check_names([meta.name for meta in self._weights.metadata()], files)

    def own_media(self, microbatch: Sequence[TrainSample]) -> list[tuple[bool, ...]]:
        """Return [sample][medium] True for the media that this rank encodes. It needs their patches; the patches of
        other media may be None.

        The samples need their grids and `media_keys`, but no patches yet.
        """
        if not self.needs_pixels:
            return [(False,) * len(sample.grid_thw) for sample in microbatch]
        encoders = parallel_state.get_tensor_and_context_parallel_group()
        return own_media(microbatch, rank=encoders.rank(), num_ranks=encoders.size())

    def step(self, microbatches: Microbatches, loss_fn: LossFunction, *, temperature: float = 1.0) -> StepResult:
        """Do one optimizer update and return its results. Every replica gives the same number of microbatches; an empty
        one adds nothing. An update whose loss or gradient is not finite is skipped on all ranks."""
        self.memory.require(EVERYTHING, "update")
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        outputs = self._run(microbatches, temperature, loss_fn)
        metrics: dict[str, float] = {}
        for scored in outputs:
            for name, value in scored.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        grad_norm = math.nan
        if is_finite := self._is_finite_everywhere(metrics.values()):
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr_at(self._num_updates) * group["lr_mult"]
            _, grad_norm, _ = self._optimizer.step()
            self._num_updates += 1
        return StepResult(
            loss_metrics=metrics,
            grad_norm=float(grad_norm),
            was_skipped=not is_finite,
            logprobs=[scored.by_sample() for scored in outputs],
        )

    def _is_finite_everywhere(self, values: Iterable[float]) -> bool:
        """Return True if these values and the gradient are finite on every rank."""
        self._optimizer.prepare_grads()  # `step` does it again, which changes nothing
        grad_norm = self._optimizer.get_grad_norm()  # collective, so every rank asks for it
        is_finite = all(map(math.isfinite, (grad_norm, *values)))
        flag = torch.tensor(float(is_finite), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    @property
    def weights(self) -> ShardedWeights:
        """The weights as an iterable of (name, full tensor) under the checkpoint's names. Gathering is collective: all
        ranks iterate to the end."""
        self.memory.require([Holding.WEIGHTS], "export")
        return self._weights

    def save(self, directory: Path, *, asynchronous: bool = False, beside: Sequence[TrainEngine] = ()) -> None:
        """Write this rank's part of a checkpoint from which `load` continues, bit for bit in the same layout. No rank
        waits for another one.

        An asynchronous one holds the present state, and is written in a thread. `beside`: other engines of this rank,
        whose state is written into the same file.
        """
        self.finish_save()
        states = {}
        for engine in (self, *beside):
            engine.memory.require([Holding.WEIGHTS, Holding.OPTIMIZER], "save a checkpoint")
            states[engine._state_name] = engine._state
        self._pending_save = rank_checkpoint.start_save(directory, states)
        if not asynchronous:
            self.finish_save()

    @property
    def _state(self) -> TrainState:
        return TrainState(self._model, self._optimizer, self._num_updates, self._adapters)

    def finish_save(self) -> None:
        """Wait until this rank's part of the save in progress, if any, is on the disk. Raises OSError if it failed."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.finish()

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint, of this layout or another."""
        self.memory.require(EVERYTHING, "load a checkpoint")
        self._num_updates = rank_checkpoint.load_checkpoint(directory, self._state, name=self._state_name)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face folder like the folder that the model came from, with the present weights. With LoRA its
        adapters are merged into them, and a folder inside has them in PEFT's form. An incomplete folder never has the
        final name.

        If it cannot be written, only rank 0 raises: the other ranks have then given their part and continue.
        """
        try:
            adapter = peft_writer(self._adapters, self._files.model_dir, PROGRESS.tick)
            if dist.get_rank() == 0:
                self._files.write_like(directory, PROGRESS.ticking(self.weights), also=adapter)
            else:
                for _ in PROGRESS.ticking(self.weights):
                    pass
        finally:
            dist.barrier()

    def _run(self, microbatches: Microbatches, temperature: float, loss_fn: LossFunction | None) -> list[_Scored]:
        """Run forward, and backward with a loss; return what the last stage computed for the scored
        tokens, per microbatch."""

        def forward_step(iterator: Iterator[Sequence[TrainSample]], model: Any) -> tuple[torch.Tensor, Any]:
            samples = next(iterator)
            batch = pack(
                samples,
                self._layout,
                multiple_of=self._multiple_of,
                sample_multiple=self._context.sample_multiple,
                device=self._device,
            )
            batch = cut(batch, self._context)
            PROGRESS.tick()
            return model(batch, temperature), lambda output: self._apply_loss(output, batch, samples, loss_fn)

        # the schedule of a virtual pipeline runs whole rounds of as many microbatches as there are stages
        num_empty = -len(microbatches) % self._microbatch_multiple
        filled = [*microbatches, *[()] * num_empty]
        scored: list[_Scored] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(filled) for _ in self._ddp],
            model=self._ddp,
            num_microbatches=len(filled),
            # both are ignored: each microbatch has its own length
            seq_length=1,
            micro_batch_size=1,
            forward_only=loss_fn is None,
        )
        return scored[: len(microbatches)]

    def _apply_loss(
        self, output: torch.Tensor, batch: PackedBatch, samples: Sequence[TrainSample], loss_fn: LossFunction | None
    ) -> tuple[torch.Tensor, torch.Tensor, _Scored]:
        """Return (loss, an unused token count, the values to keep), in the form of megatron's schedules."""
        scored = _Scored(output[0].detach(), batch.num_scored)
        if loss_fn is None or not output.shape[1]:
            # a zero that still reaches every weight, so that an empty microbatch has a backward pass
            loss = output.sum() * 0.0
        else:
            loss, scored.metrics = loss_fn(*output, loss_inputs(samples, self._device))
        return loss, torch.ones((), dtype=torch.int, device=self._device), scored


def _trains_language(freeze: Collection[Part], lora: LoraSettings | None) -> bool:
    return "language" in lora.parts if lora else "language" not in freeze
