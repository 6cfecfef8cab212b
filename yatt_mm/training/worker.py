"""The body of a training rank: it resolves the objects that its plan names, runs Megatron, and publishes and saves
weights.

Consumes: an `UpdatePlan` (refs and numbers) from the controller that drives its replica. Produces: one optimizer update
per minibatch, and an `UpdateReport`. Waits for: the other ranks of its model and data-parallel groups, inside
collectives.
"""

from __future__ import annotations

import functools
import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataplane.client.reader import Reader
from models.layout.parallel import Parallel
from yatt_mm.algorithms.losses import clipped_policy_loss
from yatt_mm.protocol import group_record
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.published import DeviceSegment, WeightStream
from yatt_mm.protocol.training import MovedMemory, TrainSpec, UpdateReport
from yatt_mm.training.distributed import device, init_distributed
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.offload import EVERYTHING, Holding
from yatt_mm.training.step_plan import Minibatch, UpdatePlan
from yatt_mm.training.train_sample import TrainSample
from yatt_mm.weights.carriers import Publisher, make_publisher, resolve_carrier
from yatt_mm.weights.stream_publisher import Receivers

HELD = {
    State.AWAKE: EVERYTHING,
    State.WEIGHTS_ONLY: frozenset({Holding.WEIGHTS}),
    State.ASLEEP: frozenset[Holding](),
}
"""[state] the parts of the training state that are on the device."""


@dataclass(slots=True)
class _Step:
    """The objects that one plan resolved to in this process."""

    plan: UpdatePlan
    records: list[group_record.GroupRecord]
    patches: list[list[np.ndarray | None]]
    """[group] uint8 patches per medium; None for those that other ranks encode."""
    old_logprobs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """(group, row) -> [sampled tokens], from the weights at the start of the step."""


class TrainWorker:
    """One rank of the training world."""

    def __init__(self, *, rank: int, spec: TrainSpec, parallel: Parallel, dataplane_uri: str) -> None:
        self._rank = rank
        self._spec = spec
        self._parallel = parallel
        self._reader = Reader(dataplane_uri, timeout_s=spec.timeout_s)
        self._state = State.AWAKE
        self._publisher: Publisher | None = None
        self._policy_version = 0
        """The version of the weights that engines got last: those at the start of the next update."""
        self._loss = functools.partial(
            clipped_policy_loss,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            entropy_coef=spec.entropy_coef,
        )

    def start(self, store_address: str, listener: socket.socket | None = None) -> None:
        """Join the training world and load the model. Waits for all other ranks.

        `listener`: see `init_distributed`.
        """
        spec, world_size = self._spec, self._parallel.world_size
        init_distributed(rank=self._rank, world_size=world_size, store_address=store_address, listener=listener)
        self._carrier = resolve_carrier(spec.carrier, device())
        host = store_address.rpartition(":")[0]
        self._receivers = Receivers(host=host, num=spec.num_receivers, deadline_s=spec.deadline_s)
        self._engine = TrainEngine(
            model_dir=Path(spec.model_dir),
            parallel=self._parallel,
            optim=spec.optim,
            dtype=spec.dtype,
            seed=spec.seed,
            recompute=spec.recompute,
            freeze=spec.freeze,
            overlap_grad_reduce=spec.overlap_grad_reduce,
        )

    def set_state(self, state: State) -> MovedMemory:
        """Go to sleep, hold weights only, or wake up, and release the device's memory accordingly. Work in another
        state raises an error."""
        if self._publisher and self._state is State.WEIGHTS_ONLY and state is not State.WEIGHTS_ONLY:
            self._publisher.release()
        moved = self._engine.memory.hold(HELD[state])
        self._state = state
        return moved

    def update(self, plan: UpdatePlan) -> UpdateReport:
        """Train one step, every minibatch of the plan in order, and return its report."""
        self._require(State.AWAKE, "update")
        started = time.perf_counter()
        step = self._resolve(plan)
        if len(plan.minibatches) > 1:
            for minibatch in plan.minibatches:
                self._measure_old_logprobs(step, minibatch)
        report = UpdateReport(is_loss_rank=self._engine.is_loss_rank)
        for minibatch in plan.minibatches:
            samples = self._samples(step, minibatch)
            result = self._engine.step(samples, self._loss, temperature=self._spec.temperature)
            if not math.isfinite(result.grad_norm):
                raise FloatingPointError(
                    f"the gradient norm is {result.grad_norm} on training rank {self._rank}; the weights are spoilt: "
                    "lower train.lr or train.clip_grad and continue with --resume from the last checkpoint"
                )
            report.add_minibatch(result.loss_metrics, result.grad_norm, len(plan.minibatches))
            self._compare(report, step, minibatch, samples, result.logprobs)
        report.resolved_bytes = sum(view.nbytes for views in step.patches for view in views if view is not None)
        report.seconds = time.perf_counter() - started
        return report

    def publish(self, path: str, version: int) -> DeviceSegment | WeightStream | None:
        """Make the weights readable for engines: in the shared-memory segment at `path`, in GPU memory, or in a stream.

        All ranks must be called, always with the same path. A segment stays until the next publish. Weights in GPU
        memory last until the rank's state changes, and a stream must have reached all engines by then.
        """
        self._require(State.WEIGHTS_ONLY, "publish")
        if self._publisher is None:
            self._publisher = make_publisher(self._carrier, self._engine.weights, path, device(), self._receivers)
        published = self._publisher.publish(version)
        self._policy_version = version
        return published

    def save(self, directory: str, asynchronous: bool) -> None:
        """Write a checkpoint from which `load` continues exactly. An asynchronous one is complete after `finish_save`.
        All ranks must be called."""
        self._require(State.AWAKE, "save")
        self._engine.save(Path(directory), asynchronous=asynchronous)

    def finish_save(self) -> None:
        """Wait until the checkpoint that is being written is on disk, in any state. All ranks must be called."""
        self._engine.finish_save()

    def load(self, directory: str) -> None:
        """Continue from a checkpoint. All ranks must be called."""
        self._require(State.AWAKE, "load")
        self._engine.load(Path(directory))

    def save_hf(self, directory: str) -> None:
        """Write the model as a Hugging Face folder. All ranks must be called."""
        self._engine.save_hf(Path(directory))

    def _require(self, state: State, what: str) -> None:
        if self._state is not state:
            raise RuntimeError(f"training rank {self._rank} is {self._state} and cannot {what}; it must be {state}")

    def _resolve(self, plan: UpdatePlan) -> _Step:
        views = self._reader.resolve([group.ref for group in plan.groups])
        records = [group_record.decode(view) for view in views]
        step = _Step(plan, records, [[None] * len(group.media) for group in plan.groups])
        wanted = sorted(self._own_media(step))
        media = self._reader.resolve([plan.groups[group].media[place] for group, place in wanted])
        for (group, place), patches in zip(wanted, media, strict=True):
            step.patches[group][place] = patches
        return step

    def _own_media(self, step: _Step) -> set[tuple[int, int]]:
        """Return (group, place) of every medium that this rank encodes in some microbatch of the step."""
        wanted: set[tuple[int, int]] = set()
        for minibatch in step.plan.minibatches:
            for planned, samples in zip(minibatch.microbatches, self._samples(step, minibatch), strict=True):
                for sample, is_own in zip(planned, self._engine.own_media(samples), strict=True):
                    wanted.update((sample.group, place) for place, own in enumerate(is_own) if own)
        return wanted

    def _samples(self, step: _Step, minibatch: Minibatch) -> list[list[TrainSample]]:
        return [
            [self._sample(step, sample.group, sample.row, sample.advantage, minibatch.token_weight) for sample in micro]
            for micro in minibatch.microbatches
        ]

    def _sample(self, step: _Step, group: int, row: int, advantage: float, token_weight: float) -> TrainSample:
        prompt = np.asarray(step.records[group].prompt_token_ids, dtype=np.int64)
        sampled = step.records[group].samples[row]
        num_sampled = len(sampled.token_ids)
        old_logprobs = step.old_logprobs.get((group, row))
        if old_logprobs is None:
            old_logprobs = np.full(num_sampled, np.nan, dtype=np.float32)
        # A token that an older policy sampled is compared with that policy, whose numbers only the engine had.
        old_logprobs = np.where(self._is_stale(sampled), sampled.logprobs, old_logprobs).astype(np.float32)
        return TrainSample(
            token_ids=np.concatenate([prompt, np.asarray(sampled.token_ids, dtype=np.int64)]),
            loss_mask=np.arange(len(prompt) + num_sampled) >= len(prompt),
            grid_thw=tuple(tuple(ref.meta["grid_thw"]) for ref in step.plan.groups[group].media),
            # images have no time; only the data plane's videos say how far apart their frames are
            seconds_per_grid=tuple(ref.meta.get("second_per_grid_t", 1.0) for ref in step.plan.groups[group].media),
            patches=tuple(step.patches[group]),
            media_keys=tuple(ref.name for ref in step.plan.groups[group].media),
            columns={
                "rollout_logprobs": np.asarray(sampled.logprobs, dtype=np.float32),
                "old_logprobs": old_logprobs,
                "advantages": np.full(num_sampled, advantage, dtype=np.float32),
                "weights": np.full(num_sampled, token_weight, dtype=np.float32),
            },
        )

    def _measure_old_logprobs(self, step: _Step, minibatch: Minibatch) -> None:
        samples = self._samples(step, minibatch)
        measured = self._engine.logprobs(samples, temperature=self._spec.temperature)
        for micro, logprobs in zip(minibatch.microbatches, measured):
            for sample, values in zip(micro, logprobs):
                step.old_logprobs[sample.group, sample.row] = values

    def _is_stale(self, sampled: group_record.SampleRecord) -> np.ndarray:
        """Return [T] True on tokens that are older than the weights at the start of the step."""
        return np.asarray(sampled.policy_versions) < self._policy_version

    def _compare(
        self,
        report: UpdateReport,
        step: _Step,
        minibatch: Minibatch,
        samples: list[list[TrainSample]],
        logprobs: list[list[np.ndarray]],
    ) -> None:
        """Compare engine and trainer on the same tokens, under the weights that sampled them; stale tokens are left
        out."""
        if not report.is_loss_rank:
            return
        for planned, micro, values in zip(minibatch.microbatches, samples, logprobs):
            for place, sample, current in zip(planned, micro, values):
                is_stale = self._is_stale(step.records[place.group].samples[place.row])
                old = sample.columns["old_logprobs"]
                trainer = np.where(np.isnan(old), current, old)
                differences = np.abs(trainer - sample.columns["rollout_logprobs"])
                report.add_difference(differences[~is_stale], num_stale=int(is_stale.sum()))
