"""Tests of pinning a reader's mapping for CUDA. Tests that need a device are skipped if there is none."""

import numpy as np
import pytest
import torch

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.client.torch_view import as_tensor, pin_for_cuda
from dataplane.core.errors import BadRequestError


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_pinning_without_cuda_says_what_is_missing(reader: Reader) -> None:
    with pytest.raises(BadRequestError, match="no CUDA"):
        pin_for_cuda(reader)


def test_a_reader_says_where_its_segment_lies(client: Client, reader: Reader) -> None:
    ref = client.put(bytes(1000), name="where")
    view = reader.resolve([ref])[0]
    mapping = reader.mapping()
    assert mapping is not None
    assert 0 <= view.__array_interface__["data"][0] - mapping.address < mapping.nbytes == 16 << 20
    client.release([ref])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_views_reach_the_device_asynchronously(client: Client, reader: Reader) -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    ref = client.put(data, name="pinned")
    with pin_for_cuda(reader) as pin:
        pin.update()
        tensor = as_tensor(reader.resolve([ref])[0])
        assert tensor.is_pinned()
        there = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(there.cpu().numpy(), data)
    client.release([ref])
