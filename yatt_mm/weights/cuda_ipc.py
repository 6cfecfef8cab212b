"""CUDA memory that another process on the same GPU maps. These lines have never run on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Handle = tuple[bytes, int, int, bytes, int, bytes, bool]
"""What CUDA and torch's allocator need to map memory: plain values, so that nothing is pickled."""


def share(flat: torch.Tensor) -> tuple[str, Handle]:
    """(UUID of the GPU, handle for `open_shared`) of CUDA memory; everything queued before is in it."""
    torch.cuda.synchronize(flat.device)
    _, *handle = flat.untyped_storage()._share_cuda_()
    return gpu_uuid(flat.device), tuple(handle)  # type: ignore[return-value]


def open_shared(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """[bytes] uint8: another process's CUDA memory, mapped here as long as the tensor lives."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_uuid(device: torch.device) -> str:
    """The same in all processes, whatever devices they see."""
    return str(torch.cuda.get_device_properties(device).uuid)
