"""Publishing through GPU memory: each rank gathers the whole model on its GPU, and engines on that GPU map it.

The memory is held from `publish` to `release`. In this time both roles may hold no more than their weights. Where each
tensor is does not change, so the index is written into a file of the host once, and no message carries it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from models.weights.export import ShardedWeights
from yatt_mm.protocol.published import DeviceSegment
from yatt_mm.weights import cuda_ipc
from yatt_mm.weights.checked_copy import NonFiniteWeightsError
from yatt_mm.weights.rank_agreement import fail_together
from yatt_mm.weights.segment import SegmentLayout, index_file, views


class DevicePublisher:
    """One training rank's part of publishing through GPU memory; `publish` is collective over all ranks."""

    def __init__(self, weights: ShardedWeights, device: torch.device, path: str | Path) -> None:
        """Write the index for engines that are told `path`."""
        self._weights = weights
        self._device = device
        self._layout = SegmentLayout.of(weights.metadata())
        self._flat: torch.Tensor | None = None
        target = index_file(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")  # every rank of the host writes the same
        draft.write_bytes(self._layout.index)
        draft.rename(target)

    def publish(self, version: int) -> DeviceSegment:
        """Gather the model in this GPU's memory, and return how engines map it. The memory is held until `release`.

        If one rank finds a value that is not finite, all ranks raise: NonFiniteWeightsError there, PublishError
        elsewhere.
        """
        flat = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        places = dict(views(flat, self._layout.index))
        is_finite: dict[str, torch.Tensor] = {}
        for name, tensor in self._weights:
            places[name].copy_(tensor)
            is_finite[name] = tensor.isfinite().all()
        fail_together(lambda: _check(is_finite))
        self._flat = flat
        gpu, handle = cuda_ipc.share(flat)
        return DeviceSegment(gpu=gpu, handle=handle)

    def release(self) -> None:
        """Free the memory. Call it when no engine maps it any more."""
        self._flat = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _check(is_finite: dict[str, torch.Tensor]) -> None:
    """Raise NonFiniteWeightsError if a tensor is not finite.

    The flags are copied together, so the device is awaited once.
    """
    flags = torch.stack(list(is_finite.values())).tolist()
    for name, flag in zip(is_finite, flags, strict=True):
        if not flag:
            raise NonFiniteWeightsError.of(name)
