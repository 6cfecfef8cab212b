"""Tests that a ref names one content: if its name later has other bytes, they are never returned for the ref."""

import os

import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, ChecksumError


@pytest.mark.parametrize("nbytes", [100, PUT_IN_PLACE_FROM, 5 << 20])
def test_a_ref_of_content_that_was_replaced_is_refused_everywhere(client: Client, reader: Reader, nbytes: int) -> None:
    old = client.put(os.urandom(nbytes), name="renewed")
    client.release([old])
    data = os.urandom(nbytes)
    new = client.put(data, name="renewed")
    assert old.version != new.version == int(content_digest(data)[:16], 16) >> 1
    with pytest.raises(ChecksumError, match="released and written again"):
        reader.resolve([old])
    with pytest.raises(ChecksumError, match="released and written again"):
        client.get(old)
    assert reader.resolve([new])[0].tobytes() == data == client.get(new)
    assert client.put(data, name="renewed") == new
    with pytest.raises(BadRequestError, match="exists with other content"):
        client.put(data[:-1] + bytes([data[-1] ^ 1]), name="renewed")
    client.release([new])
