"""Sharing CUDA memory with another process on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Handle = tuple[bytes, int, int, bytes, int, bytes, bool]
"""The values that CUDA and torch's allocator need to map memory; plain values, so that nothing is pickled."""


def share(flat: torch.Tensor) -> tuple[str, Handle]:
    """Share CUDA memory: return the GPU's UUID and the handle for `open_shared`.

    Waits until all work queued on the GPU is done, so that the memory contains its results.
    """
    torch.cuda.synchronize(flat.device)
    _, *handle = flat.untyped_storage()._share_cuda_()
    return gpu_uuid(flat.device), tuple(handle)  # type: ignore[return-value]


def open_shared(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return [bytes] uint8: another process's CUDA memory, mapped in this process as long as the tensor exists."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of the GPU, which is the same in all processes, whatever device numbers they use."""
    return str(torch.cuda.get_device_properties(device).uuid)
