"""Views of a data-plane node's memory that are registered with CUDA."""

from __future__ import annotations

import numpy as np
import torch

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.client.torch_view import as_tensor, pin_for_cuda


def test_pinned_views_reach_the_device_asynchronously() -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node, Client(node.uri) as client, Reader(node.uri) as reader:
        ref = client.put(data, name="pinned")
        with pin_for_cuda(reader):
            tensor = as_tensor(reader.resolve([ref])[0])
            assert tensor.is_pinned()
            there = tensor.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert np.array_equal(there.cpu().numpy(), data)
