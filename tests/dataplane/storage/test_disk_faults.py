"""Tests that nothing is lost or leaked if a disk fails for a while, or if a process has no descriptor left."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.object_downloader import ObjectDownloader
from dataplane.client.reader import Reader
from dataplane.core.errors import ChecksumError, OverloadedError
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.group_commit import GroupCommit
from tests.dataplane.serving import serving
from tests.dataplane.shards import wait_until

MIB = 1 << 20


def started(folder: Path) -> Node:
    """A node in this process, with 2 MiB of memory and 64 MiB of disk."""
    return Node(NodeConfig(memory_bytes=2 * MIB, spill_dir=folder, spill_bytes=64 * MIB, node_id="one"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    running = started(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(node.uri, timeout_s=10) as opened:
        yield opened


@contextmanager
def opening_fails(monkeypatch: pytest.MonkeyPatch, error: OSError) -> Iterator[None]:
    """Make opening object files fail with this error."""
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".arrow"):
            raise error
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        yield


def make_cold(client: Client, name: str, data: bytes) -> Any:
    """Store a durable object and evict it from memory, so that only its file is left."""
    ref = client.put(data, name=name, durable=True)
    client.release([client.put(bytes(2 * MIB), name="flood")])
    return ref


@pytest.mark.parametrize("code", [24, 5, 13])
def test_a_durable_file_that_cannot_be_opened_for_a_while_is_not_lost(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ref = make_cold(client, "kept", b"kept" * 1000)
    path = next((node.config.spill_dir / "durable" / "objects").iterdir())  # type: ignore[operator]
    with opening_fails(monkeypatch, OSError(code, os.strerror(code))), Reader(node.uri, timeout_s=5) as reader:
        with pytest.raises(OverloadedError, match="nothing is lost: ask again"):
            reader.resolve([ref])
        with pytest.raises(OverloadedError, match="nothing is lost: ask again"):
            client.get(ref)
        wait_until(lambda: client.stat()["num_leases"] == 0)
    assert path.exists()
    assert client.get(ref) == b"kept" * 1000
    wait_until(lambda: client.stat()["num_leases"] == 0)


@pytest.mark.parametrize("harm", ["bytes", "cut", "replaced"])
def test_a_durable_file_that_was_damaged_is_set_aside_and_not_removed(tmp_path: Path, harm: str) -> None:
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        ref = make_cold(client, "harmed", b"harmed" * 100_000)
        path = next((tmp_path / "durable" / "objects").iterdir())
        if harm == "bytes":
            with path.open("r+b") as file:
                file.seek(10_000)
                file.write(b"?")
        elif harm == "cut":
            os.truncate(path, 10_000)
        else:
            path.unlink()
            path.write_bytes(b"something else")
        found = path.read_bytes()
        with Reader(node.uri) as reader, pytest.raises(ChecksumError, match=r"harmed is lost.*put it again"):
            reader.resolve([ref])
        wait_until(lambda: client.stat()["num_leases"] == 0)
        assert client.stat()["spilled_bytes"] == 0
        assert path.with_suffix(".damaged").read_bytes() == found and not path.exists()
        again = client.put(b"harmed" * 100_000, name="harmed", durable=True)
    node.stop()
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        assert client.get(again) == b"harmed" * 100_000
    node.stop()
    assert path.with_suffix(".damaged").read_bytes() == found


def test_many_spilled_objects_are_sent_and_mapped_with_few_descriptors(node: Node, client: Client) -> None:
    refs = [client.put(np.full(4096, at % 251, np.uint8), name=f"small/{at}") for at in range(600)]
    client.release([client.put(bytes(2 * MIB), name="flood")])
    assert client.stat()["num_spilled"] == 600
    copier = ObjectDownloader(node.uri, None)
    with Reader(node.uri, timeout_s=20) as reader:
        reader.resolve(refs[:1])
        copier.fetch(refs[:1], time.monotonic() + 30)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        now = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + 100, hard))
        try:
            copies = copier.fetch(refs, time.monotonic() + 30)
            views = reader.resolve(refs)
            assert len(list(Path("/proc/self/fd").iterdir())) < now + 50
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for at, (copy, view) in enumerate(zip(copies, views, strict=True)):
            assert copy.tobytes() == bytes([at % 251]) * 4096 == view.tobytes()
            assert not view.flags.writeable
        del views, view
    copier.close()
    wait_until(lambda: client.stat()["num_leases"] == 0)
    assert client.release(refs) == 600


def test_a_node_may_open_as_many_files_as_its_machine_lets_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with serving(tmp_path / "log") as served:
            line = next(
                text
                for text in Path(f"/proc/{served.process.pid}/limits").read_text().splitlines()
                if "open files" in text
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert line.split()[3:5] == [str(hard), str(hard)]


def test_a_sync_that_ends_in_any_error_is_an_error_for_all_who_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, begun, go = GroupCommit(), threading.Event(), threading.Event()
    results: dict[int, BaseException | None] = {}

    def fail(fd: int) -> None:
        begun.set()
        assert go.wait(10)
        raise MemoryError("no memory")

    monkeypatch.setattr(os, "fsync", fail)

    def write(at: int) -> None:
        (tmp_path / f".{at}").touch()
        try:
            commits.commit(tmp_path / f".{at}", tmp_path / f"{at}", [tmp_path])
            results[at] = None
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=write, args=(at,)) for at in range(4)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(commits._next.files) == 3)
    go.set()
    for thread in threads:
        thread.join(10)
    kinds = sorted(type(error).__name__ for error in results.values())
    assert kinds == ["MemoryError", "MemoryError", "OSError", "OSError"]


def test_a_folder_of_a_closed_scope_does_not_fail_the_puts_that_share_its_sync(tmp_path: Path) -> None:
    (tmp_path / ".x").touch()
    GroupCommit().commit(tmp_path / ".x", tmp_path / "x", [tmp_path / "closed", tmp_path])
    assert (tmp_path / "x").exists()
