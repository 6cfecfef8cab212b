"""Checkpoints of a training world, which load in another parallel layout too.

They hold weights, optimizer state, and the number of updates, of the policy and of its critic if there is one: names of
a critic's tensors begin with `critic/`. Each rank copies to host memory what its optimizer owns, and writes it in a
thread while training continues; nothing is gathered, and no rank waits for another one.
`yatt_mm.common.checkpoints` names, commits and prunes checkpoints. State outside of the engine (the order of prompts,
metrics) is not stored here.

A tensor in a checkpoint has a name and a shape that do not depend on the layout: megatron's `sharded_state_dict` says
where each parameter of a rank lies in it. Of a trained parameter there are `weight` (the optimizer's float32 value),
`exp_avg` and `exp_avg_sq`; of a frozen one there is `weight` in the model's dtype, of which each replica writes a part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.compat.megatron_core import (
    MegatronModule,
    MegatronOptimizer,
    ShardedTensor,
    ShardedTensorFactory,
    parallel_state,
)
from models.lora.adapters import Adapters
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import note_written
from yatt_mm.common.writing import writing
from yatt_mm.training.boxes import Box, stretch
from yatt_mm.training.optimizer import continue_after, make_state
from yatt_mm.training.part_files import Parts, Piece, part_name, write_part

WEIGHT = "weight"
OF_OPTIMIZER = {WEIGHT: "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""[kind of tensor in a checkpoint] what the optimizer calls it."""
NUM_UPDATES = "num_updates"
LORA = "train.lora"


@dataclass(frozen=True, slots=True)
class TrainState:
    """One model of a rank with its optimizer."""

    model: torch.nn.ModuleList
    optimizer: MegatronOptimizer
    num_updates: int
    adapters: Adapters | None

    @property
    def settings(self) -> dict[str, str]:
        """What a checkpoint has besides tensors."""
        return {NUM_UPDATES: str(self.num_updates), **_lora_settings(self.adapters)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a stretch of a rank's parameter lies in the checkpoint."""

    key: str
    """The parameter's name in the checkpoint."""
    shape: tuple[int, ...]
    """The shape of the stretch in the rank's memory."""
    offset: tuple[int, ...]
    """The place of its first element in the tensor of the checkpoint, which may have more axes in front."""
    start: int
    """The number of elements of the parameter before it."""
    may_grow: bool
    """True if the size of the whole tensor depends on the layout, as that of a padded vocabulary does."""

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Yield those of the parameter's elements `start` to `stop` that are in this place, as (place among the
        elements from `start` on, box in the checkpoint)."""
        first, last = max(start, self.start), min(stop, self.start + math.prod(self.shape))
        num_before = len(self.offset) - len(self.shape)
        for before, box in stretch(self.shape, first - self.start, last - self.start):
            offset = (*self.offset[:num_before], *(a + b for a, b in zip(self.offset[num_before:], box.offset)))
            yield first - start + before, Box(offset=offset, shape=(1,) * num_before + box.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A tensor of a rank's model, and where it lies in the checkpoint."""

    data: torch.Tensor
    places: tuple[_Place, ...]
    is_first_copy: bool
    """True on the one of several tensor-parallel ranks or stages with the same values that writes them."""
    replica: int
    """The number of this rank among the data-parallel ranks with the same values."""

    @property
    def num_replicas(self) -> int:
        """The number of these ranks."""
        if getattr(self.data, "allreduce", True):
            return parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return parallel_state.get_expert_data_parallel_world_size()


class PendingSave:
    """A checkpoint whose state was copied. Training may continue while a thread writes this rank's part."""

    def __init__(self, directory: Path, pieces: Sequence[Piece], settings: dict[str, str]) -> None:
        self.nbytes = sum(piece.values.nbytes for piece in pieces)
        """The bytes that this rank holds in host memory and writes."""
        self._directory = directory
        self._pieces = pieces
        self._settings = settings
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {directory}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until this rank's part is on the disk. Raises DiskError if it could not be written."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        path = self._directory / part_name(dist.get_rank(), dist.get_world_size())
        try:
            with writing(self._directory):
                self._write(path)
        except Exception as error:  # it is raised in the thread that waits
            self._error = error
        self._pieces = ()

    def _write(self, path: Path) -> None:
        note_written(path, write_part(path, self._pieces, self._settings))


def start_save(directory: Path, states: Mapping[str, TrainState]) -> PendingSave:
    """Begin to write this rank's part of the training state into `directory` (made if missing). Every rank calls it,
    with the same path. `states`: the models by the beginning of the names of their tensors.

    The checkpoint holds the present weights, whatever happens to them afterwards.
    """
    for state in states.values():
        if state.num_updates == 0:
            make_state(state.optimizer)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    pieces = [
        replace(piece, name=name + piece.name)
        for name, state in states.items()
        for piece in _pieces(_parameters(state.model, state.adapters), state.optimizer)
    ]
    settings = {name + key: text for name, state in states.items() for key, text in state.settings.items()}
    return PendingSave(directory, pieces, settings)


@torch.no_grad()
def load_checkpoint(directory: Path, state: TrainState, *, name: str = "") -> int:
    """Continue from a checkpoint of any layout; return its number of updates. Every rank calls it. `name`: the
    beginning of the names of the model's tensors.

    Raises:
        CheckpointError: the checkpoint is not finished, is one of another model or of other adapters, belongs
            to another base than that of the adapters, or has no model of this name.
    """
    parts = Parts(directory, name)
    if NUM_UPDATES not in parts.settings:
        raise CheckpointError(
            f"the checkpoint in {directory} has no critic, because its run had another algorithm.name: set that back, "
            "or start a new run from the exported model"
        )
    _check_lora(parts.settings, _lora_settings(state.adapters))
    optimizer, parameters = state.optimizer, _parameters(state.model, state.adapters)
    make_state(optimizer)
    base = {id(param) for param in state.model.parameters() if not param.requires_grad} if state.adapters else set()
    for number, parameter in parameters.items():
        before = parameter.data.clone() if number in base else None
        _read(parts, WEIGHT, parameter, 0, parameter.data.numel(), parameter.data)
        if before is not None and not torch.equal(before, parameter.data):
            raise CheckpointError(
                f"model.path is not the model whose adapters are in the checkpoint in {directory}: "
                f"{parameter.places[0].key} has other values; set it back, or start a new run from the exported model"
            )
    num_updates = int(parts.settings[NUM_UPDATES])
    for distributed in optimizer.chained_optimizers:
        for param, start, stop in _owned(distributed):
            values = distributed._get_main_param_and_optimizer_states(param)
            for kind, its_name in OF_OPTIMIZER.items():
                _read(parts, kind, parameters[id(param)], start, stop, values[its_name])
    continue_after(optimizer, num_updates)
    return num_updates


def _read(parts: Parts, kind: str, parameter: _Parameter, start: int, stop: int, out: torch.Tensor) -> None:
    """Fill `out` with the elements `start` to `stop` of a parameter, or of its moments."""
    values = out.detach().view(-1)
    for place in parameter.places:
        for at, box in place.boxes(start, stop):
            num_filled = parts.read(f"{kind}/{place.key}", box, values[at : at + box.numel].view(box.shape))
            if num_filled != box.numel:
                _check_missing(parts, kind, place, box, num_filled)


def _check_missing(parts: Parts, kind: str, place: _Place, box: Box, num_filled: int) -> None:
    """Raise CheckpointError unless the values of a box that a checkpoint does not have are the padding of a tensor that
    was smaller where it was saved."""
    name = f"{kind}/{place.key}"
    extent = parts.extent(name)
    if extent is None and parts.extent(f"{WEIGHT}/{place.key}") is not None:
        raise CheckpointError(
            f"{place.key} was frozen when the checkpoint was saved, so it has no {kind} of it: freeze it again "
            "(train.freeze), or start a new run from the exported model"
        )
    saved = box.overlap(Box(offset=(0,) * len(extent), shape=extent)) if place.may_grow and extent else box
    if num_filled != (saved.numel if saved else 0):
        raise CheckpointError(
            f"the checkpoint has {num_filled} of the {box.numel} values of {name} that are wanted from {box.offset} "
            "on; it is one of another model, or of another version of this program"
        )


def _pieces(parameters: dict[int, _Parameter], optimizer: MegatronOptimizer) -> Iterator[Piece]:
    """Yield what this rank writes, as copies in host memory."""
    trained: set[int] = set()
    for distributed in optimizer.chained_optimizers:
        trained.update(map(id, distributed.model_param_group_index_map))
        for param, start, stop in _owned(distributed):
            parameter = parameters[id(param)]
            if parameter.is_first_copy:
                state = distributed._get_main_param_and_optimizer_states(param)
                for kind, name in OF_OPTIMIZER.items():
                    yield from _copies(kind, parameter, start, stop, state[name])
    for key, parameter in parameters.items():
        if parameter.data.requires_grad and key not in trained:
            continue  # other replicas own all of it
        if key not in trained and parameter.is_first_copy:
            numel = parameter.data.numel()
            start, stop = (
                numel * part // parameter.num_replicas for part in (parameter.replica, parameter.replica + 1)
            )
            yield from _copies(WEIGHT, parameter, start, stop, parameter.data.detach().view(-1)[start:stop])


def _copies(kind: str, parameter: _Parameter, start: int, stop: int, values: torch.Tensor) -> Iterator[Piece]:
    """Yield the pieces of the elements `start` to `stop` of a parameter, of which `values` are those."""
    flat = values.detach().view(-1)
    for place in parameter.places:
        for at, box in place.boxes(start, stop):
            copied = flat[at : at + box.numel].to("cpu", copy=True)
            yield Piece(name=f"{kind}/{place.key}", box=box, values=copied)


def _owned(distributed: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield (parameter, start, stop): the elements of parameters that this rank's optimizer updates."""
    for buffers in distributed.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end


def _lora_settings(adapters: Adapters | None) -> dict[str, str]:
    """Return the settings of LoRA as texts, by their keys in the config; none without LoRA."""
    if adapters is None:
        return {}
    settings = adapters.settings
    return {
        f"{LORA}.rank": str(settings.rank),
        f"{LORA}.alpha": f"{settings.alpha:g}",
        f"{LORA}.targets": ", ".join(sorted(settings.targets)),
    }


def _check_lora(saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Raise CheckpointError unless a checkpoint was saved with the same settings of LoRA."""
    for key in sorted({key for key in saved if key.startswith(f"{LORA}.")} | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            before, now = (settings.get(key, "not set") for settings in (saved, wanted))
            raise CheckpointError(
                f"{key} was {before} when the checkpoint was saved, and is {now}: set it back, or start a new run from "
                "the exported model"
            )


def _parameters(model: torch.nn.ModuleList, adapters: Adapters | None) -> dict[int, _Parameter]:
    """Return the tensors of a rank's model by the `id` of each."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    chunks: list[MegatronModule] = list(model)  # type: ignore[arg-type]
    found = {}
    for chunk in chunks:
        for entry in chunk.sharded_state_dict(metadata=metadata).values():
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue  # the extra state of layers in low precision, of which there are none
            pp, tp, dp = entry.replica_id
            found[id(entry.data)] = _Parameter(
                data=entry.data, places=tuple(_places(entry)), is_first_copy=pp == 0 and tp == 0, replica=dp
            )
    for matrix in adapters.matrices() if adapters else ():  # megatron takes those that are cut for whole ones
        places = tuple(
            _Place(key=matrix.name, shape=part.shape, offset=part.offset, start=part.start, may_grow=False)
            for part in matrix.stretches
        )
        found[id(matrix.param)] = _Parameter(
            data=matrix.param, places=places, is_first_copy=matrix.is_first_copy, replica=group.rank()
        )
    return found


def _places(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[_Place]:
    """Yield the places of a parameter's stretches: one, or those of the parts that megatron keeps in one tensor."""
    inside = [entry] if isinstance(entry, ShardedTensor) else entry.build()
    for part in inside if isinstance(inside, list) else inside.values():
        assert part.data.is_contiguous(), f"{part.key} is cut across its rows"
        yield _Place(
            key=part.key,
            shape=tuple(part.local_shape),
            offset=tuple(part.global_offset),
            start=part.data.storage_offset() - entry.data.storage_offset(),
            may_grow=part.allow_shape_mismatch,
        )
