"""Views as torch tensors, without a copy. The only file of the data plane that knows torch, and it loads it lazily."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import torch


def as_tensor(view: np.ndarray) -> "torch.Tensor":
    """A tensor over the same memory; it keeps the view, and so its lease, alive.

    Read-only as the view is: torch does not know that, and writing into it stops the process. Clone it to write.
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
