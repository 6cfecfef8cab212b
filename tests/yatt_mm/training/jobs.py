"""The jobs that tests run on ranks. Each function builds an engine, does one task and returns numpy values."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.peaks import measured_host_peak
from dataplane.core.process import return_freed_memory
from models.compat.megatron_core import parallel_state
from models.freeze import Part
from models.layout.parallel import Parallel
from models.sequence.mrope import MediaSpan, mrope_positions
from tests.yatt_mm.training.tiny import Form, make_samples, with_patches_of
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.common.manifest import FileRecord, num_written
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training import rank_checkpoint
from yatt_mm.training.distributed import device
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.offload import EVERYTHING, Holding
from yatt_mm.training.train_sample import TrainSample
from yatt_mm.weights.segment_publisher import SegmentPublisher
from yatt_mm.weights.stream_publisher import Receivers, StreamPublisher

OF_ENGINE = ("recompute", "freeze", "overlap_grad_reduce", "lora")
"""The settings that are not the optimizer's."""
GROUPS = ((0, 1, 6), (2,), (3, 4), (5, 7))
"""The samples of four microbatches: images and a video, text alone, images, all kinds."""
TEXT_LAST = ((0, 1, 6), (2,), (3, 4, 7), (5,))
"""The samples with a last microbatch of text alone, so that the second of two replicas has no image at all."""


def build_engine(model_dir: Path, parallel: Parallel, *, dtype: str = "float32", **settings: Any) -> TrainEngine:
    """Return an engine. Without other `settings` it has no weight decay and no clipping."""
    defaults: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.95), "clip_grad": 0.0}
    of_engine = {name: settings.pop(name) for name in OF_ENGINE if name in settings}
    optim = AdamSettings(**(defaults | settings))
    return TrainEngine(model_dir=model_dir, parallel=parallel, optim=optim, dtype=dtype, seed=1, **of_engine)


def microbatches(engine: TrainEngine, groups: Sequence[Sequence[int]] = GROUPS) -> list[list[TrainSample]]:
    """Return this replica's microbatches, every dp-th group, with the patches of the images that this rank encodes."""
    samples = make_samples(form_of(engine))
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return [own_part(engine, [samples[i] for i in group]) for group in groups[rank::size]]


def form_of(engine: TrainEngine) -> Form:
    """Return the form of media that samples for the engine's model must have."""
    if not engine._layout.has_mrope:
        return "tiles"
    return "frames" if engine._layout.tokens_per_second is None else "spans"


def own_part(engine: TrainEngine, microbatch: Sequence[TrainSample]) -> list[TrainSample]:
    """Return the samples of the microbatch, with only those patches that this rank encodes, as the training worker
    makes them."""
    without = [with_patches_of(sample, [False] * len(sample.patches)) for sample in microbatch]
    is_own = engine.own_media(without)
    return [with_patches_of(sample, own) for sample, own in zip(microbatch, is_own, strict=True)]


def zero_gradients(engine: TrainEngine) -> None:
    """Set the gradients to zero."""
    for chunk in engine._ddp:
        chunk.zero_grad_buffer()


def weighted_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss to which both outputs contribute, so that both backward passes are tested."""
    loss = weighted_sum(logprobs, entropy, inputs.weights)
    return loss, {"loss": loss.detach(), "entropy": (inputs.weights * entropy).sum().detach()}


def weighted_sum(logprobs: torch.Tensor, entropy: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the loss of tokens with these weights."""
    return -(weights * (logprobs + 0.3 * entropy)).sum()


def zero_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss 0, and a metric with the sum of the entropies."""
    return logprobs.sum() * 0, {"entropy": entropy.sum().detach()}


def exported(engine: TrainEngine) -> dict[str, np.ndarray]:
    """Return every tensor of the model by its Hugging Face name."""
    return {name: tensor.float().cpu().clone().numpy() for name, tensor in engine.weights}


def score(engine: TrainEngine) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (log-probabilities, entropies) of each of this replica's samples, after a backward pass over them.

    The list is empty on ranks that are not on the last stage. The forward pass alone must give the same bits.
    """
    before = engine.logprobs(microbatches(engine))
    zero_gradients(engine)
    scored = engine._run(microbatches(engine), 1.0, _keep_entropies)
    entropies = [part.metrics["entropies"].cpu().split(list(part.num_scored)) for part in scored]
    pairs = [
        (logprobs, entropy.numpy())
        for part, split in zip(scored, entropies)
        for logprobs, entropy in zip(part.by_sample(), split, strict=True)
    ]
    alone = [logprobs for part in before for logprobs in part]
    assert all(np.array_equal(found, logprobs) for found, (logprobs, _) in zip(alone, pairs, strict=True))
    return pairs


def worst_of_bfloat16(rank: int, model_dir: Path) -> float:
    """Return how far the log-probabilities and entropies of a model in bfloat16 are at most from those in float32."""
    halves, wholes = (score(build_engine(model_dir, Parallel(), dtype=dtype)) for dtype in ("bfloat16", "float32"))
    return max(
        float(np.abs(half - whole).max())
        for of_half, of_whole in zip(halves, wholes, strict=True)
        for half, whole in zip(of_half, of_whole, strict=True)
    )


def _keep_entropies(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return weighted_loss(logprobs, entropy, inputs)[0], {"entropies": entropy.detach()}


def load_and_export(rank: int, model_dir: Path, checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint by their Hugging Face names."""
    engine = build_engine(model_dir, Parallel())
    engine.load(checkpoint)
    return exported(engine)


def export_and_score(rank: int, model_dir: Path, parallel: Parallel) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return the exported tensors, and this replica's log-probabilities."""
    engine = build_engine(model_dir, parallel)
    return exported(engine), [values for part in engine.logprobs(microbatches(engine)) for values in part]


def publish(rank: int, model_dir: Path, parallel: Parallel, path: str, version: int) -> None:
    """Write the weights for engines, as a training rank does."""
    SegmentPublisher(build_engine(model_dir, parallel).weights, path).publish(version)


def stream(rank: int, model_dir: Path, parallel: Parallel, path: str, version: int) -> None:
    """Send the weights to one receiver, which finds at `path` how to get them."""
    receivers = Receivers(num=1, deadline_s=60)
    weights = build_engine(model_dir, parallel).weights
    publisher = StreamPublisher(weights, torch.device("cpu"), f"{path}.meeting", receivers)
    announced = publisher.publish(version)
    if announced:
        draft = Path(f"{path}.draft")
        draft.write_bytes(pickle.dumps(announced))
        draft.rename(path)
    publisher.release()


def train(rank: int, model_dir: Path, parallel: Parallel, num_steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return losses (summed over replicas), gradient norms and final weights of a few updates."""
    engine = build_engine(model_dir, parallel, **settings)
    return _steps(engine, num_steps) | {"weights": exported(engine)}


def train_with_releases(
    rank: int, model_dir: Path, parallel: Parallel, num_steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Do the same as `train`, with all memory released between updates, in the order of a colocated step."""
    engine = build_engine(model_dir, parallel, **settings)
    memory = engine.memory
    losses, norms, host_bytes, left, refusals = [], [], [], [], []
    for _ in range(num_steps):
        done = _steps(engine, 1)
        losses += done["losses"]
        norms += done["norms"]
        held = {part: memory.resident_bytes(part) for part in Holding}
        given = memory.hold([Holding.WEIGHTS]).released_bytes
        exported(engine)
        given += memory.hold([]).released_bytes
        assert given == sum(held.values())
        left.append(sum(memory.resident_bytes(part) for part in Holding))
        for work in (lambda: _steps(engine, 1), lambda: exported(engine), lambda: engine.save(Path("nowhere"))):
            try:
                work()
            except RuntimeError as error:
                refusals.append(str(error))
        host_bytes.append(memory.host_bytes)
        memory.hold([Holding.WEIGHTS])
        engine.logprobs(microbatches(engine))
        memory.hold(EVERYTHING)
        assert {part: memory.resident_bytes(part) for part in Holding} == held
    return {
        "losses": losses,
        "norms": norms,
        "weights": exported(engine),
        "left": left,
        "host_bytes": host_bytes,
        "refusals": refusals,
        "at_end": held,
    }


def curves(
    rank: int, model_dir: Path, cases: dict[str, tuple[Parallel, dict[str, Any]]], num_steps: int
) -> dict[str, dict[str, list[float]]]:
    """Return losses and gradient norms of each case, one after the other."""
    return {
        name: _steps(build_engine(model_dir, layout, **its), num_steps, TEXT_LAST)
        for name, (layout, its) in cases.items()
    }


def train_and_save(
    rank: int,
    model_dir: Path,
    parallel: Parallel,
    directory: Path,
    dtype: str = "float32",
    settings: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Run two updates, save a checkpoint and an exported folder, then run two more updates."""
    engine = build_engine(model_dir, parallel, warmup_steps=3, weight_decay=0.1, dtype=dtype, **settings)
    _steps(engine, 2)
    engine.save(directory / "checkpoint")
    engine.save_hf(directory / "hf")
    return {"saved": exported(engine)} | _steps(engine, 2) | {"weights": exported(engine)}


def save_both_ways(
    rank: int, model_dir: Path, parallel: Parallel, directory: Path, dtype: str = "float32"
) -> dict[str, Any]:
    """Run two updates, save one checkpoint at once and one that is written only after two more updates."""
    engine = build_engine(model_dir, parallel, warmup_steps=3, weight_decay=0.1, dtype=dtype)
    _steps(engine, 2)
    engine.save(directory / "at once")
    trained = threading.Event()
    write = rank_checkpoint.write_part

    def write_later(*arguments: Any) -> FileRecord:
        assert trained.wait(200)
        return write(*arguments)

    with mock.patch.object(rank_checkpoint, "write_part", write_later):
        engine.save(directory / "later", asynchronous=True)
        done = _steps(engine, 2) | {"weights": exported(engine)}
        dist.barrier()
        done["was_complete"] = num_written(directory / "later") > 0
        dist.barrier()  # or another rank might have written its part before this one looks
        trained.set()
        engine.finish_save()
    dist.barrier()
    return done


def load_both(
    rank: int, model_dir: Path, parallel: Parallel, directory: Path, dtype: str = "float32"
) -> dict[str, dict[str, Any]]:
    """Continue from each checkpoint of `save_both_ways`, one after the other, with two updates."""
    engine = build_engine(model_dir, parallel, warmup_steps=3, weight_decay=0.1, dtype=dtype)
    found = {}
    for name in ("at once", "later"):
        engine.load(directory / name)
        found[name] = _steps(engine, 2) | {"weights": exported(engine)}
    return found


def save_where_it_cannot(rank: int, model_dir: Path, parallel: Parallel, directory: Path) -> str:
    """Return the error of `finish_save` if a folder takes the place of a file while the ranks train."""
    engine = build_engine(model_dir, parallel)
    trained = threading.Event()
    write = rank_checkpoint.write_part

    def write_later(*arguments: Any) -> FileRecord:
        assert trained.wait(200)
        return write(*arguments)

    with mock.patch.object(rank_checkpoint, "write_part", write_later):
        engine.save(directory / "checkpoint", asynchronous=True)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(directory / "checkpoint")
        dist.barrier()
        trained.set()
        try:
            engine.finish_save()
        except OSError as error:
            return str(error)
    return "no error"


def save_then_train(rank: int, model_dir: Path, parallel: Parallel, directory: Path) -> dict[str, Any]:
    """Save a checkpoint of the untrained model, then run two updates."""
    engine = build_engine(model_dir, parallel, warmup_steps=3, weight_decay=0.1)
    engine.save(directory / "checkpoint")
    return _steps(engine, 2) | {"weights": exported(engine)}


def load_and_train(
    rank: int,
    model_dir: Path,
    parallel: Parallel,
    directory: Path,
    dtype: str = "float32",
    settings: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Continue from the checkpoint of `train_and_save` with two updates."""
    engine = build_engine(model_dir, parallel, warmup_steps=3, weight_decay=0.1, dtype=dtype, **settings)
    engine.load(directory / "checkpoint")
    return {"loaded": exported(engine)} | _steps(engine, 2) | {"weights": exported(engine)}


def save_part(rank: int, model_dir: Path, parallel: Parallel, directory: Path, freeze: tuple[Part, ...]) -> int:
    """Save the untrained model, and return how many bytes this rank held in host memory for that."""
    engine = build_engine(model_dir, parallel, freeze=freeze)
    engine.save(directory, asynchronous=True)
    assert engine._pending_save is not None
    nbytes = engine._pending_save.nbytes
    engine.finish_save()
    dist.barrier()
    return nbytes


def growth_in_a_save(rank: int, model_dir: Path, parallel: Parallel, directory: Path) -> tuple[int, int]:
    """Save a trained model, and return the bytes of this rank's part, and the most by which the memory of its process
    grew for that."""
    engine = build_engine(model_dir, parallel)
    _steps(engine, 1)
    return_freed_memory()
    with measured_host_peak() as peak:
        engine.save(directory, asynchronous=True)
        assert engine._pending_save is not None
        nbytes = engine._pending_save.nbytes
        engine.finish_save()
    dist.barrier()
    return nbytes, peak.num_bytes


def _steps(engine: TrainEngine, num_steps: int, groups: Sequence[Sequence[int]] = GROUPS) -> dict[str, Any]:
    losses, norms = [], []
    for _ in range(num_steps):
        result = engine.step(microbatches(engine, groups), weighted_loss)
        loss = result.loss_metrics["loss"] if engine.is_loss_rank else 0.0
        total = torch.tensor([loss], dtype=torch.float64, device=device())
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms}


def gradients(engine: TrainEngine) -> dict[str, np.ndarray]:
    """Return the full gradients by Hugging Face name: the replicas' shards are gathered, then exported instead of the
    weights."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in engine._ddp:
        buffers = [(dense, buffer) for buffer in chunk.buffers]
        buffers += [(experts, buffer) for buffer in chunk.expert_parallel_buffers]
        for group, buffer in buffers:
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    for param in engine._model.parameters():
        param.data = param.main_grad
    return exported(engine)


def tower_after_training(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, np.ndarray]:
    """Return this rank's own copy of the vision tower after two updates."""
    engine = build_engine(model_dir, parallel)
    _steps(engine, 2)
    tower = engine._model[0].vision_model
    assert tower is not None
    return {name: param.detach().numpy().copy() for name, param in tower.named_parameters()}


def gradients_by_split(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, dict[str, np.ndarray]]:
    """Return the gradients of the same samples, divided into microbatches in several ways."""
    splits: dict[str, list[tuple[int, ...]]] = {
        "together": [(0, 1, 2, 3, 4, 5)],
        "one each": [(0,), (1,), (2,), (3,), (4,), (5,)],
        "reordered": [(5, 3), (4, 0, 2, 1)],
        "with empty ones": [(), (0, 1, 2), (), (3, 4, 5), ()],
    }
    return {name: _gradients_of(build_engine(model_dir, parallel), split) for name, split in splits.items()}


def text_only_gradients(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, np.ndarray]:
    """Return the gradients of a microbatch without any image."""
    return _gradients_of(build_engine(model_dir, parallel), [(2, 5)])


def logprobs_at(rank: int, model_dir: Path, temperatures: Sequence[float]) -> dict[float, np.ndarray]:
    """Return all log-probabilities at each temperature."""
    engine = build_engine(model_dir, Parallel())
    return {
        temperature: np.concatenate(
            [values for part in engine.logprobs(microbatches(engine), temperature=temperature) for values in part]
        )
        for temperature in temperatures
    }


def learning_rates(rank: int, model_dir: Path) -> list[float]:
    """Return the learning rate of each of five updates, four of which are warm-up."""
    engine = build_engine(model_dir, Parallel(), lr=1.0, warmup_steps=4)
    rates = []
    for _ in range(5):
        engine.step(microbatches(engine), zero_loss)
        rates.append(engine._optimizer.param_groups[0]["lr"])
    return rates


def refusal(rank: int, model_dir: Path, parallel: Parallel) -> str:
    """Return the error of an engine for a folder that it refuses."""
    try:
        build_engine(model_dir, parallel)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"rank {rank} took {model_dir}")


def place(rank: int, model_dir: Path, parallel: Parallel) -> tuple[int, bool, bool]:
    """Return (replica, wants pixels, counts for the loss) of this rank."""
    engine = build_engine(model_dir, parallel)
    return parallel_state.get_data_parallel_rank(), engine.needs_pixels, engine.is_loss_rank


def _gradients_of(engine: TrainEngine, groups: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    zero_gradients(engine)
    engine._run(microbatches(engine, groups), 1.0, weighted_loss)
    return gradients(engine)


def frozen_parts(rank: int, model_dir: Path, parallel: Parallel, parts: Sequence[Part]) -> dict[str, Any]:
    """Return each part of the model after a few updates, and what the optimizer keeps of it."""
    engine = build_engine(model_dir, parallel, freeze=parts)
    before = exported(engine)
    result = _steps(engine, 2)
    after = exported(engine)
    num_trained = sum(param.numel() for param in engine._model.parameters() if param.requires_grad)
    num_states = sum(buffer.numel for chunk in engine._ddp for buffer in chunk.buffers)
    return result | {"before": before, "after": after, "num_trained": num_trained, "num_states": num_states}


def owned_media(rank: int, model_dir: Path, parallel: Parallel) -> list[list[tuple[bool, ...]]]:
    """Return [microbatch][sample][medium] True for the media that this rank encodes, from keys and grids alone."""
    engine = build_engine(model_dir, parallel)
    without = [with_patches_of(sample, [False] * len(sample.patches)) for sample in make_samples()]
    return [engine.own_media([without[i] for i in group]) for group in GROUPS]


def logprobs_without_pixels(rank: int, model_dir: Path) -> None:
    """Fail, because this rank does not get the patches that it must encode."""
    engine = build_engine(model_dir, Parallel())
    engine.logprobs([[with_patches_of(sample, [False] * len(sample.patches)) for sample in make_samples()]])


def logprobs_of(rank: int, model_dir: Path, parallel: Parallel, samples: Sequence[TrainSample]) -> list[np.ndarray]:
    """Return the log-probabilities of each sample's sampled tokens."""
    engine = build_engine(model_dir, parallel)
    return engine.logprobs([samples])[0]


def logprobs_of_shifted_positions(
    rank: int, model_dir: Path, parallel: Parallel, samples: Sequence[TrainSample]
) -> list[np.ndarray]:
    """Return the same with the positions of each sample's second half moved by one."""

    def shifted(num_tokens: int, spans: Sequence[MediaSpan]) -> np.ndarray:
        positions = np.array(mrope_positions(num_tokens, spans))
        positions[:, num_tokens // 2 :] += 1
        return positions

    with mock.patch("models.sequence.packing.mrope_positions", shifted):
        return logprobs_of(rank, model_dir, parallel, samples)


def update_after_poison(rank: int, model_dir: Path, parallel: Parallel, poison: str) -> dict[str, Any]:
    """Do two updates, then one whose loss or gradient is not finite on the last rank alone, then one more."""

    def poisoned(
        logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = weighted_loss(logprobs, entropy, inputs)
        if rank < dist.get_world_size() - 1:
            return loss, metrics
        if poison == "loss":
            return loss, metrics | {"loss": torch.tensor(float("nan"))}
        return loss * float("inf"), metrics

    engine = build_engine(model_dir, parallel, clip_grad=0.5)
    _steps(engine, 2)
    before = exported(engine)
    result = engine.step(microbatches(engine), poisoned)
    return {"before": before, "after": exported(engine), "was_skipped": result.was_skipped} | _steps(engine, 1)
