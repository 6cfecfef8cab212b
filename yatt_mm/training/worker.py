"""The body of a training rank: it resolves the objects that its plan names, runs Megatron, and publishes and saves
weights.

Consumes: an `UpdatePlan` (refs and numbers) from the controller that drives its replica. Produces: one optimizer update
per minibatch, and an `UpdateReport`. Waits for: the other ranks of its model and data-parallel groups, inside
collectives.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from dataplane.client.reader import Reader
from models.layout.parallel import Parallel
from models.weights.checkpoint_files import CheckpointFiles
from yatt_mm.algorithms.kl import ESTIMATORS
from yatt_mm.algorithms.losses import policy_loss
from yatt_mm.algorithms.table import ALGORITHMS
from yatt_mm.common.writing import writing
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.published import DeviceSegment, WeightStream
from yatt_mm.protocol.training import MovedMemory, TrainSpec, UpdateReport
from yatt_mm.training.critic import Critic
from yatt_mm.training.distributed import device, init_distributed
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.offload import EVERYTHING, Holding
from yatt_mm.training.planned_samples import Resolved, Samples, resolve_plan
from yatt_mm.training.sent_bytes import SentBytes
from yatt_mm.training.skipped_update import write_update
from yatt_mm.training.step_plan import UpdatePlan
from yatt_mm.training.train_sample import SampledTokens
from yatt_mm.weights.carriers import Publisher, make_publisher, resolve_carrier
from yatt_mm.weights.stream_group import StreamError
from yatt_mm.weights.stream_publisher import Receivers

HELD = {
    State.AWAKE: EVERYTHING,
    State.WEIGHTS_ONLY: frozenset({Holding.WEIGHTS}),
    State.ASLEEP: frozenset[Holding](),
}
"""[state] the parts of the training state that are on the device."""


class TrainWorker:
    """One rank of the training world."""

    def __init__(self, *, rank: int, spec: TrainSpec, parallel: Parallel, dataplane_uri: str) -> None:
        self._rank = rank
        self._spec = spec
        self._parallel = parallel
        self._reader = Reader(dataplane_uri, timeout_s=spec.timeout_s)
        self.sent = SentBytes(is_counted=bool(spec.node_id))
        self._state = State.AWAKE
        self._publisher: Publisher | None = None
        self._step: int | None = 0
        """The step whose update the weights have; None while the ranks compute together, and after that failed."""
        self._report: UpdateReport | None = None
        """That of the last update."""
        self._reference: CheckpointFiles | None = None
        self._critic: Critic | None = None

    def start(self, store: str) -> None:
        """Join the training world, which meets in `store`, and load the model. Waits for all other ranks."""
        spec, world_size = self._spec, self._parallel.world_size
        init_distributed(rank=self._rank, world_size=world_size, store=store)
        self._carrier = resolve_carrier(spec.carrier, device())
        self._receivers = Receivers(num=spec.num_receivers, deadline_s=spec.deadline_s)
        make_engine = functools.partial(
            TrainEngine,
            parallel=self._parallel,
            dtype=spec.dtype,
            seed=spec.seed,
            recompute=spec.recompute,
            freeze=spec.freeze,
            overlap_grad_reduce=spec.overlap_grad_reduce,
        )
        self._engine = make_engine(model_dir=Path(spec.model_dir), optim=spec.optim, lora=spec.lora)
        if spec.critic is not None:
            engine = make_engine(model_dir=Path(spec.critic.model_dir), optim=spec.critic.optim, scores="values")
            self._critic = Critic(engine, spec.algorithm)
        if spec.references is not None:
            self._reference = CheckpointFiles(spec.references.first)
            self._engine.check_names(self._reference)

    def set_state(self, state: State) -> MovedMemory:
        """Go to sleep, hold weights only, or wake up, and release the device's memory accordingly. Work in another
        state raises an error."""
        if self._publisher and self._state is State.WEIGHTS_ONLY and state is not State.WEIGHTS_ONLY:
            self._publisher.release()
        moved = self._critic.hold(state is State.AWAKE) if self._critic else MovedMemory()
        moved += self._engine.memory.hold(HELD[state])
        self._state = state
        return moved

    def update(self, plan: UpdatePlan, step: int) -> UpdateReport:
        """Train one step, every minibatch of the plan in order, and return its report. A step on which the weights were
        trained already is not trained again: that happens if a fault came after it."""
        self._require(State.AWAKE, "update")
        if step == self._step and self._report is not None:
            return self._report
        self._begin_step(step)
        with self.sent.of("gradients"):
            self._report = report = self._train(plan, step)
        self._step = step
        return report

    def divergences(self, plan: UpdatePlan, step: int) -> list[tuple[str, int, float]]:
        """Return (name of the group's record, row, divergence from the reference of a step, summed up over its tokens)
        of each planned response; nothing on ranks whose numbers do not count. The tokens have the log-probabilities
        with which they were sampled."""
        self._require(State.AWAKE, "measure divergences")
        weights_at, self._step = self._step, None  # as in an update that is under way
        minibatches = self._resolve(plan, step).minibatches
        with self._saying_what_saves_memory(), self.sent.of("gradients"):
            self._measure_reference(minibatches, step)
        self._step = weights_at
        if not self._engine.is_loss_rank:
            return []
        estimate = ESTIMATORS[self._spec.algorithm.kl.estimator]
        found = []
        for minibatch, samples in zip(plan.minibatches, minibatches, strict=True):
            for planned, micro in zip(minibatch.microbatches, samples, strict=True):
                for one, sample in zip(planned, micro, strict=True):
                    tokens = sample.sampled
                    assert tokens is not None and tokens.reference_logprobs is not None
                    differences = torch.from_numpy(tokens.rollout_logprobs - tokens.reference_logprobs).double()
                    found.append((plan.groups[one.group].ref.name, one.row, float(estimate(differences).sum())))
        return found

    def pass_over(self, step: int) -> None:
        """Go to the next step with the same weights."""
        if step != self._step:
            self._begin_step(step)
            self._report, self._step = None, step

    def settle(self) -> int | None:
        """Finish what is being written, go to sleep, and return the step whose update the weights have: None if an
        update was broken off, after which they are of no use."""
        with contextlib.suppress(OSError):  # the checkpoint is saved again
            self.finish_save()
        if self._publisher is not None:
            with contextlib.suppress(StreamError):  # an engine may be gone; the weights are as they were
                self._publisher.release()
        if self._step is not None:
            self.set_state(State.ASLEEP)
        return self._step

    def _begin_step(self, step: int) -> None:
        if self._step is None or step != self._step + 1:
            raise RuntimeError(f"training rank {self._rank} is at step {self._step} and cannot go to step {step}")
        self._step = None

    def _train(self, plan: UpdatePlan, step: int) -> UpdateReport:
        started = time.perf_counter()
        resolved = self._resolve(plan, step)
        minibatches = resolved.minibatches
        settings, algorithm = self._spec.algorithm, ALGORITHMS[self._spec.algorithm.name]
        with self._saying_what_saves_memory():
            if settings.kl.where == "loss":
                self._measure_reference(minibatches, step)
            if len(minibatches) > 1 and "old_logprobs" in algorithm.needs:
                for minibatch in minibatches:
                    self._measure_old_logprobs(minibatch)
            values = self._critic.measure(plan, minibatches) if self._critic else {}
        report = UpdateReport(
            is_loss_rank=self._engine.is_loss_rank,
            resolved_bytes=resolved.nbytes,
            far_bytes=resolved.far_nbytes(self._spec.node_id) if self._spec.node_id else None,
            critic_values=values,
        )
        done = []
        for number, (planned, minibatch) in enumerate(zip(plan.minibatches, minibatches, strict=True)):
            if not planned.total_weight:  # on no rank: old momentum would move the weights
                continue
            loss = functools.partial(
                policy_loss, surrogate=algorithm.surrogate, settings=settings, total_weight=planned.total_weight
            )
            with self._saying_what_saves_memory():
                result = self._engine.step(minibatch, loss, temperature=self._spec.temperature)
                of_critic = None
                if self._critic is not None and not result.was_skipped:
                    of_critic = self._critic.step(minibatch, planned.total_weight)
            if result.was_skipped or (of_critic is not None and of_critic.was_skipped):
                report.num_skipped += 1
                folder = Path(self._spec.skipped_dir) / f"step_{step:06d}"
                path = folder / f"update-{number}-rank-{self._rank}.npz"
                write_update(path, minibatch, result.logprobs, result.loss_metrics)
                continue
            done.append((result, of_critic))
            if self._engine.is_loss_rank:
                _compare(report, minibatch, result.logprobs)
        for result, of_critic in done:
            report.add_minibatch(result.loss_metrics, result.grad_norm, len(done))
            if of_critic is not None:
                report.add_critic(of_critic.loss_metrics, of_critic.grad_norm, len(done))
        report.seconds = time.perf_counter() - started
        return report

    @contextlib.contextmanager
    def _saying_what_saves_memory(self) -> Iterator[None]:
        """Add to the error of a device that is full which settings need less."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            ways = ["lower train.max_tokens_per_microbatch (and train.max_patches_per_microbatch)"]
            if self._spec.recompute != "full":
                ways.append("set train.recompute to full")
            if self._spec.dtype == "float32":
                ways.append("set model.dtype to bfloat16")
            elif not self._spec.optim.offload_frac:
                ways.append("set train.optimizer_offload_fraction")
            raise RuntimeError(
                f"an update needs more memory than the device has: {', or '.join(ways)}. {error}"
            ) from error

    def publish(self, path: str, version: int) -> DeviceSegment | WeightStream | None:
        """Make the weights readable for engines: in the shared-memory segment at `path`, in GPU memory, or in a stream.

        All ranks must be called, always with the same path. A segment stays until the next publish. Weights in GPU
        memory last until the rank's state changes, and a stream must have reached all engines by then.
        """
        self._require(State.WEIGHTS_ONLY, "publish")
        if self._publisher is None:
            self._publisher = make_publisher(self._carrier, self._engine.weights, path, device(), self._receivers)
        with self.sent.of("weights"):
            return self._publisher.publish(version)

    def save(self, directory: str, asynchronous: bool) -> None:
        """Write this rank's part of a checkpoint from which `load` continues exactly. All ranks must be called."""
        self._require(State.AWAKE, "save")
        beside = [self._critic.engine] if self._critic else []
        self._engine.save(Path(directory), asynchronous=asynchronous, beside=beside)

    def finish_save(self) -> None:
        """Wait until this rank's part of the checkpoint that is being written is on the disk. The rank may be asleep or
        awake."""
        self._engine.finish_save()

    def load(self, directory: str, step: int) -> None:
        """Continue from a checkpoint of `step`. All ranks must be called."""
        self._require(State.AWAKE, "load")
        self._step = None  # as in an update that is under way
        self._engine.load(Path(directory))
        if self._critic is not None:
            self._critic.engine.load(Path(directory))
        self._step = step

    def save_hf(self, directory: str) -> None:
        """Write the model as a Hugging Face folder. All ranks must be called."""
        with writing(Path(directory)):
            self._engine.save_hf(Path(directory))

    def _require(self, state: State, what: str) -> None:
        if self._state is not state:
            raise RuntimeError(f"training rank {self._rank} is {self._state} and cannot {what}; it must be {state}")

    def _resolve(self, plan: UpdatePlan, step: int) -> Resolved:
        """Return the samples of a step; see `resolve_plan`."""
        return resolve_plan(
            plan,
            self._reader,
            self._engine.own_media,
            policy_version=step - 1,
            is_corrected=self._spec.algorithm.correction.kind != "none",
        )

    def _measure_reference(self, minibatches: Sequence[Samples], step: int) -> None:
        assert self._spec.references is not None
        folder = self._spec.references.of(step)
        if self._reference is None or self._reference.model_dir != folder:
            self._reference = CheckpointFiles(folder)
        with self._engine.weights_of(self._reference):
            for minibatch in minibatches:
                for tokens, values in self._measured(minibatch):
                    tokens.reference_logprobs = values

    def _measure_old_logprobs(self, minibatch: Samples) -> None:
        for tokens, values in self._measured(minibatch):
            tokens.measure(values)

    def _measured(self, minibatch: Samples) -> Iterator[tuple[SampledTokens, np.ndarray]]:
        """Yield the tokens of each sample with their log-probabilities under the present weights; nothing on ranks that
        are not on the last stage."""
        measured = self._engine.logprobs(minibatch, temperature=self._spec.temperature)
        for micro, logprobs in zip(minibatch, measured):
            for sample, values in zip(micro, logprobs):
                assert sample.sampled is not None
                yield sample.sampled, values


def _compare(report: UpdateReport, minibatch: Samples, logprobs: Sequence[Sequence[np.ndarray]]) -> None:
    """Compare engine and trainer on the same tokens, under the weights that sampled them. Stale tokens are left out.

    `logprobs`: [microbatch][sample][K] under the weights before the minibatch's update.
    """
    for micro, of_micro in zip(minibatch, logprobs):
        for sample, current in zip(micro, of_micro):
            tokens = sample.sampled
            assert tokens is not None
            trainer = np.where(tokens.is_current, current, tokens.old_logprobs)
            differences = np.abs(trainer - tokens.rollout_logprobs)
            report.add_difference(differences[~tokens.is_stale], num_stale=int(tokens.is_stale.sum()))
