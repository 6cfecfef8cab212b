"""Tests that clients open only arenas and spilled files of their own user, because the process at an address may not be
a node."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.reader import Reader
from dataplane.client.writer import Writer
from dataplane.core.errors import DataPlaneError, NodeUnavailableError
from dataplane.core.hosts import default_host_id
from dataplane.core.refs import Ref
from dataplane.core.shared_files import PREFIX, SHM_DIR, identity, map_file, open_segment
from dataplane.storage.arena import Segment
from dataplane.storage.presence_file import PresenceFile

EIGHT_BYTES = Ref(name="x", kind="plain", node="rogue", dtype="uint8", shape=(8,), nbytes=8, lineage=None)


class RogueServer(fl.FlightServerBase):
    """A server that claims to be a node of this machine, whose arena is any file that the test chooses."""

    def __init__(self, segment: Mapping[str, Any], offset: int, presence: Mapping[str, Any]) -> None:
        self._hello: dict[str, Any] = {"node": "rogue", "incarnation": "0", "session": "0", "host": default_host_id()}
        self._hello["presence"] = dict(presence)
        self._hello["segments"] = [dict(segment)]
        self._offset = offset
        super().__init__("grpc://127.0.0.1:0")

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        verb = json.loads(descriptor.command)["verb"]
        if verb != "resolve":
            writer.write_metadata(pa.py_buffer(json.dumps(self._hello).encode()))
        while True:
            try:
                request = json.loads(bytes(reader.read_chunk().app_metadata))
            except (StopIteration, pa.ArrowException):
                return
            writer.write_metadata(pa.py_buffer(json.dumps(self._answer(request)).encode()))

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "present" in request or "ended" in request:
            return {"is_open": True}
        if "names" in request:
            columns = {"segment": [0], "offset": [self._offset], "nbytes": [8], "dtype": ["uint8"], "shape": [[8]]}
            return {"locators": columns | {"version": [0], "lease": [1], "files": []}}
        sizes = request.get("allocate")
        if isinstance(sizes, list):
            return {"places": [{"segment": 0, "offset": self._offset} for _ in sizes]}
        return {"segment": 0, "offset": self._offset}

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise fl.FlightServerError("a rogue stores nothing")


@contextmanager
def rogue(segment: Mapping[str, Any], offset: int = 0) -> Iterator[str]:
    """Yield the address of a server that says that `segment` is its shared memory."""
    own = Segment(1 << 16, "rogue")
    presence = PresenceFile(own)
    server = RogueServer(segment, offset, presence.describe())
    try:
        yield f"grpc://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        presence.close()
        own.unlink()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that is not a segment of an arena."""
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    return path


def described(path: Path, **changes: Any) -> dict[str, Any]:
    """Return the description that a node would send of a file."""
    found = path.stat()
    return {"path": str(path), "nbytes": found.st_size, "device": found.st_dev, "inode": found.st_ino, **changes}


def write_big(uri: str) -> None:
    with Client(uri, timeout_s=30) as client:
        client.put(np.ones(2 * PUT_IN_PLACE_FROM, np.uint8), name="x")


def write_in_place(uri: str) -> None:
    with Writer(uri, timeout_s=30) as writer, writer.create("x", "uint8", (8,)) as place:
        place.array[:] = 1


def read(uri: str) -> None:
    with Reader(uri, timeout_s=30) as reader:
        assert reader.mapping() is None, "it mapped the file"
        raise NodeUnavailableError("nothing was mapped")


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("use", [write_big, write_in_place, read])
def test_a_server_that_names_another_file_as_its_arena_gets_nothing_written_or_mapped(
    victim: Path, use: Callable[[str], None], is_exact: bool
) -> None:
    segment = described(victim) if is_exact else {"path": str(victim), "nbytes": 8}
    with rogue(segment) as uri, pytest.raises(DataPlaneError):
        use(uri)
    assert victim.read_bytes() == b"precious"


def test_a_place_or_a_locator_outside_of_the_arena_is_refused() -> None:
    segment = Segment(1 << 20, "reach")
    try:
        for offset in (-8, 1 << 20, 1 << 40):
            with rogue(segment.describe(), offset) as uri:
                with pytest.raises(NodeUnavailableError, match="outside of its arena"):
                    write_big(uri)
                with Reader(uri, timeout_s=30) as reader:
                    assert reader.mapping() is not None
                    if offset > 0:
                        with pytest.raises(NodeUnavailableError, match="outside of its node's memory"):
                            reader.resolve([EIGHT_BYTES])
        assert segment.path.stat().st_size == 1 << 20
    finally:
        segment.unlink()


def test_only_a_private_whole_arena_in_shared_memory_is_opened(tmp_path: Path) -> None:
    segment = Segment(1 << 16, "reach")
    try:
        whole = segment.describe()
        os.close(open_segment(whole, os.O_RDWR))
        for change in ({"nbytes": 1 << 15}, {"device": None}, {"inode": whole["inode"] + 1}):
            with pytest.raises(OSError, match=r"another file|wanted a regular file"):
                open_segment(whole | change, os.O_RDWR)
        for key in ("device", "inode"):
            with pytest.raises(OSError, match="another file"):
                open_segment({name: value for name, value in whole.items() if name != key}, os.O_RDWR)
        segment.path.chmod(0o640)
        with pytest.raises(OSError, match="others may use it"):
            open_segment(whole, os.O_RDWR)
        segment.path.chmod(0o600)
        link = SHM_DIR / f"{PREFIX}link-{os.getpid()}"
        link.symlink_to(segment.path)
        try:
            with pytest.raises(OSError, match="another file"):
                open_segment(whole | {"path": str(link)}, os.O_RDWR)
        finally:
            link.unlink()
        for path in (f"{SHM_DIR}/../{segment.path}", f"{SHM_DIR}/{PREFIX}x/../{segment.path.name}", "/etc/passwd"):
            with pytest.raises(OSError, match="cannot be an arena"):
                open_segment(whole | {"path": path}, os.O_RDWR)
    finally:
        segment.unlink()


def test_memory_without_a_name_is_opened_only_if_a_node_made_it(victim: Path) -> None:
    fds = [os.memfd_create(f"{PREFIX}x"), os.memfd_create("other"), os.open(victim, os.O_RDWR)]
    try:
        os.ftruncate(fds[0], 8)
        os.ftruncate(fds[1], 8)
        named = [{"path": f"/proc/{os.getpid()}/fd/{fd}", "nbytes": 8, **identity(fd)} for fd in fds]
        os.close(open_segment(named[0], os.O_RDWR))
        for other in named[1:]:
            with pytest.raises(OSError, match="not the memory of a node"):
                open_segment(other, os.O_RDWR)
    finally:
        for fd in fds:
            os.close(fd)


def test_a_spilled_object_is_a_regular_file_of_this_user_with_the_right_name(tmp_path: Path, victim: Path) -> None:
    file = tmp_path / "x.arrow"
    file.write_bytes(b"12345678")
    assert np.asarray(map_file(described(file))).tobytes() == b"12345678"
    link = tmp_path / "link.arrow"
    link.symlink_to(victim)
    pipe = tmp_path / "pipe.arrow"
    os.mkfifo(pipe)
    for shared in (described(victim), described(link), described(pipe), {"path": str(file), "nbytes": 8}):
        with pytest.raises(OSError, match=r"does not end|another file|wanted a regular file"):
            map_file(shared)
