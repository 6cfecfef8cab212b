"""Releases the device memory of a training rank in parts, and takes it back, so that engines can use it in between.

Storages are emptied and filled again; no tensor is made anew and none is rebound. The optimizer's shards of a float32
model are views into the buffer of the weights, and everything that megatron keeps points into its flat buffers. A new
tensor in the place of an old one would be updated while the model computes with the old one.

The buffers of modules (rotary frequencies, a few kilobytes), and the memory of collectives, stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

import torch

from models.compat.megatron_core import DistributedDataParallel, MegatronOptimizer
from yatt_mm.protocol.training import MovedMemory


class Holding(StrEnum):
    """The parts of a rank's state that it can hold or release."""

    WEIGHTS = "weights"
    """Trained and frozen weights in the model's dtype."""
    GRADIENTS = "gradients"
    """The float32 buffer of gradient sums. It is not copied: between updates its content is not needed."""
    OPTIMIZER = "optimizer"
    """Moments, and float32 main weights where the model's are not float32."""


EVERYTHING = frozenset(Holding)
_Numbered = dict[int, tuple[torch.UntypedStorage, int]]
"""By its number in a part, a storage and the bytes that it has while the part is held."""


class TrainMemory:
    """Which parts of one rank's training state are on its device; all of them at the start."""

    def __init__(self, models: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._models = models
        self._optimizer = optimizer
        self._held = EVERYTHING
        self._empty: dict[Holding, _Numbered] = {}
        self._host: dict[tuple[Holding, int], torch.Tensor] = {}

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that this rank uses to keep its released state. The memory is reused, so the
        value never shrinks."""
        return sum(copy.numel() for copy in self._host.values())

    def resident_bytes(self, part: Holding) -> int:
        """Return the bytes that a part takes on the device now."""
        return sum(storage.nbytes() for storage in self._storages(part))

    def hold(self, parts: Iterable[Holding]) -> MovedMemory:
        """Hold exactly these parts. Other parts are released first, and missing ones are restored bit for bit."""
        wanted = frozenset(parts)
        started = time.perf_counter()
        released = sum(self._release(part) for part in Holding if part in self._held - wanted)
        if released and torch.cuda.is_available():
            torch.cuda.empty_cache()
        between = time.perf_counter()
        restored = sum(self._restore(part) for part in Holding if part in wanted - self._held)
        self._held = wanted
        return MovedMemory(
            released_bytes=released,
            restored_bytes=restored,
            release_s=between - started,
            restore_s=time.perf_counter() - between,
        )

    def require(self, parts: Iterable[Holding], what: str) -> None:
        """Raise RuntimeError unless all `parts` are held, because `what` needs them."""
        missing = [part for part in Holding if part in frozenset(parts) - self._held]
        if missing:
            raise RuntimeError(f"cannot {what}: released {', '.join(missing)}; hold them again before it")

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other weights take the place of the model's for a block, at whose end these come back bit for bit."""
        self.require([Holding.WEIGHTS], "lend the weights")
        storages = self._numbered(Holding.WEIGHTS)
        self._to_host(Holding.WEIGHTS, storages)
        try:
            yield
        finally:
            self._from_host(Holding.WEIGHTS, storages)

    def _release(self, part: Holding) -> int:
        # torch resizes no host storage on which `.numpy()` was called: it stays, which costs the host nothing
        storages = {number: one for number, one in self._numbered(part).items() if one[0].resizable()}
        if part is not Holding.GRADIENTS:
            self._to_host(part, storages)
        for storage, _ in storages.values():
            storage.resize_(0)
        self._empty[part] = storages
        return sum(size for _, size in storages.values())

    def _restore(self, part: Holding) -> int:
        storages = self._empty.pop(part)
        for storage, size in storages.values():
            storage.resize_(size)
        if part is not Holding.GRADIENTS:
            self._from_host(part, storages)
        return sum(size for _, size in storages.values())

    def _to_host(self, part: Holding, storages: _Numbered) -> None:
        for number, (storage, size) in storages.items():
            self._host_copy(part, number, size).copy_(_as_bytes(storage), non_blocking=True)
        _wait_for_copies()

    def _from_host(self, part: Holding, storages: _Numbered) -> None:
        for number, (storage, _) in storages.items():
            _as_bytes(storage).copy_(self._host[part, number], non_blocking=True)
        _wait_for_copies()

    def _numbered(self, part: Holding) -> _Numbered:
        return {number: (storage, storage.nbytes()) for number, storage in enumerate(self._storages(part))}

    def _host_copy(self, part: Holding, number: int, size: int) -> torch.Tensor:
        """Return the host buffer of one storage: the same memory at every call, because allocating it is slow. With
        CUDA the memory is page-locked."""
        found = self._host.get((part, number))
        if found is None or found.numel() != size:
            found = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._host[part, number] = found
        return found

    def _storages(self, part: Holding) -> list[torch.UntypedStorage]:
        """Return distinct storages, always in the same order. A storage that optimizer and weights share counts for the
        weights."""
        if part is Holding.WEIGHTS:
            return _distinct(self._weights())
        if part is Holding.GRADIENTS:
            return _distinct(buffer.grad_data for buffer in self._buffers())
        weights = _distinct(self._weights())
        shared = {storage._cdata for storage in weights}
        mine = (storage for storage in _distinct(self._optimizer_tensors()) if storage._cdata not in shared)
        # with `train.optimizer_offload_fraction` a part of it is never on the device
        return [storage for storage in mine if storage.device == weights[0].device]

    def _buffers(self) -> Iterator[_Buffer]:
        for model in self._models:
            yield from (*model.buffers, *model.expert_parallel_buffers)

    def _weights(self) -> Iterator[torch.Tensor]:
        yield from (buffer.param_data for buffer in self._buffers())
        for model in self._models:
            yield from (param for param in model.parameters() if not param.requires_grad)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for chained in self._optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                yield from group["params"]
            for state in chained.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class _Buffer(Protocol):
    """The part of megatron's flat buffer that this module uses."""

    param_data: torch.Tensor
    grad_data: torch.Tensor


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return list(found.values())


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
