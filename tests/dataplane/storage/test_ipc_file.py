"""Tests of the Arrow files of objects: where the body begins, and what any Arrow reader finds."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataplane.core.errors import ChecksumError
from dataplane.storage.ipc_file import ALIGN, read_ipc, write_ipc


@pytest.mark.parametrize("length", [0, 1, 200, 240, 241, 242, 243, 244, 245, 256, 500, 3800, 4096, 20_000])
@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_the_body_begins_at_a_page_whatever_the_description(tmp_path: Path, length: int, nbytes: int) -> None:
    path, about = tmp_path / "object", {"name": "x" * length}
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    offset = write_ipc(path, data, about)

    assert read_ipc(path) == (offset, nbytes, about)
    assert offset % ALIGN == 0
    assert path.read_bytes()[offset : offset + nbytes] == data.tobytes() and (offset or not nbytes)


def test_any_arrow_reader_opens_the_file(tmp_path: Path) -> None:
    path, data = tmp_path / "object", np.arange(100, dtype=np.uint8)

    write_ipc(path, data, {"name": "frames", "note": "é"})

    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["data"].to_numpy().tolist() == data.tolist()
    said = json.loads(table.schema.metadata[b"dataplane"])
    assert said.items() >= {"name": "frames", "note": "é", "nbytes": 100}.items()


@pytest.mark.parametrize("nbytes", [0, 300])
def test_a_bit_that_changes_anywhere_outside_of_the_body_is_found(tmp_path: Path, nbytes: int) -> None:
    path, data = tmp_path / "object", np.zeros(nbytes, np.uint8)
    offset = write_ipc(path, data, {"ref": {"name": "a name", "shape": [300]}, "digest": "0" * 32})
    good = path.read_bytes()
    body = range(offset, offset + nbytes)
    places = [at for at in range(len(good)) if at not in body and (at % 7 == 0 or good[at] not in b" \0")]
    assert len(places) > 1000
    for number, at in enumerate(places):
        harmed = bytearray(good)
        harmed[at] ^= 1 << number % 8
        path.write_bytes(harmed)
        with pytest.raises(ChecksumError, match=str(path)):
            read_ipc(path)
    path.write_bytes(good)
    assert read_ipc(path)[1] == nbytes


@pytest.mark.parametrize(("offset", "nbytes", "hole"), [(-1, 5, 0), (0, 1 << 20, 0), (64, -1, 0), (0, 0, 1 << 30)])
def test_a_description_that_does_not_fit_the_file_is_refused_before_anything_is_read(
    tmp_path: Path, offset: int, nbytes: int, hole: int
) -> None:
    path = tmp_path / "object"
    said = json.dumps({"offset": offset, "nbytes": nbytes, "frame": "0" * 32})
    schema = pa.schema([("data", pa.uint8())], metadata={"dataplane": said})
    made = tmp_path / "made"
    with pa.OSFile(str(made), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1], pa.uint8())], schema=schema))
    with path.open("wb") as file:
        file.write(made.read_bytes()[:8])
        file.seek(hole, os.SEEK_CUR)  # a reader finds the end first, and what it tells of the rest
        file.write(made.read_bytes()[8:])
    with pytest.raises(ChecksumError, match=f"{nbytes} bytes at {offset} in a file of"):
        read_ipc(path)
