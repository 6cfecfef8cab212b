"""Use views of objects as torch tensors without a copy, and register a reader's memory with CUDA.

`as_tensor` wraps a view; `pin_for_cuda` makes copies of views to a GPU asynchronous and fast. This is the only file of
the data plane that uses torch, and it imports torch only inside its functions.
"""

from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from dataplane.core.errors import BadRequestError, DataPlaneError

if TYPE_CHECKING:
    import torch

    from dataplane.client.reader import Reader

_REGISTER_PORTABLE, _REGISTER_READ_ONLY = 0x01, 0x08  # cudaHostRegister* of cuda_runtime_api.h


def as_tensor(view: np.ndarray) -> "torch.Tensor":
    """Return a torch tensor over the memory of a view. The tensor keeps the view, and so the lease, alive.

    The memory is read-only, but torch does not know that: writing into the tensor kills the process. Clone the tensor
    to write.
    """
    import torch

    if not view.flags.c_contiguous:
        raise ValueError(f"the view has strides {view.strides}; wanted a C-contiguous one: take the whole object")
    if not view.nbytes:
        return torch.from_numpy(np.empty(view.shape, view.dtype))
    address = view.__array_interface__["data"][0]
    data = pa.foreign_buffer(address, view.nbytes, base=view)
    flat = torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), view.nbytes, [None, data]))
    dtype: torch.dtype = torch.from_numpy(np.empty(0, view.dtype)).dtype
    return flat.view(dtype).view(view.shape)


class CudaPin:
    """The registration of a reader's segments with CUDA, which makes copies of views to a GPU asynchronous and fast."""

    def __init__(self, reader: "Reader") -> None:
        self._reader = reader
        self._registered: dict[int, object] = {}  # address -> the object that keeps it mapped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def update(self) -> None:
        """Register with CUDA the segment that the reader maps now, unless it is registered. Call this after the node
        restarted."""
        import torch

        mapped = self._reader.mapping()
        if mapped is None:
            raise BadRequestError(
                f"this reader maps no memory of {self._reader.uri} but copies over Flight; pin the copies instead"
            )
        if mapped.address in self._registered:
            return
        flags = _REGISTER_PORTABLE | _REGISTER_READ_ONLY
        status = int(torch.cuda.cudart().cudaHostRegister(mapped.address, mapped.nbytes, flags))
        if status:
            raise DataPlaneError(
                f"cudaHostRegister of {mapped.nbytes} bytes failed with CUDA error {status}; where the device cannot "
                "register read-only memory (cudaDevAttrHostRegisterReadOnlySupported), copy to pinned tensors instead"
            )
        self._registered[mapped.address] = mapped

    def close(self) -> None:
        """Unregister all segments. Call this only after every copy out of a view has finished."""
        import torch

        while self._registered:
            address, _owner = self._registered.popitem()
            torch.cuda.cudart().cudaHostUnregister(address)


def pin_for_cuda(reader: "Reader") -> CudaPin:
    """Register the memory that `reader` maps with CUDA, read-only, until the returned object is closed.

    Raises BadRequestError without CUDA, or if the reader maps no memory.
    """
    import torch

    if not torch.cuda.is_available():
        raise BadRequestError("this machine, or this build of torch, has no CUDA; pin_for_cuda needs a GPU")
    pin = CudaPin(reader)
    pin.update()
    return pin
