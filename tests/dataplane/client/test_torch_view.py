"""Tests of pinning a reader's mapping for CUDA, without a device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.client.torch_view import pin_for_cuda
from dataplane.core.errors import BadRequestError, DataPlaneError


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


def test_the_memory_of_a_reader_is_registered_once_read_only_until_the_end(
    client: Client, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the calls of CUDA. `tests/gpu/test_pinned_views.py` makes them."""
    calls: list[tuple[Any, ...]] = []
    status = [0, 1]
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *said: calls.append(("register", *said)) or status.pop(0),
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    ref = client.put(bytes(1000), name="pinned")
    view = reader.resolve([ref])[0]
    mapping = reader.mapping()
    assert mapping is not None
    registered = ("register", mapping.address, mapping.nbytes, 0x01 | 0x08)
    with pin_for_cuda(reader) as pin:
        pin.update()
        assert calls == [registered]
    assert calls == [registered, ("unregister", mapping.address)]
    with pytest.raises(DataPlaneError, match="failed with CUDA error 1; where the device cannot"):
        pin_for_cuda(reader)
    del view
    client.release([ref])
