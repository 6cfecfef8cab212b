"""Tests where a node's memory comes from, and who may map it: without /dev/shm, in other containers, on NUMA
machines."""

import ctypes
import fcntl
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.lease_session import LeaseSession
from dataplane.client.reader import Reader
from dataplane.client.writer import Writer
from dataplane.core.errors import BadRequestError
from dataplane.core.process import Trimmer
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.arena import Segment, reap_dead_segments
from dataplane.storage.numa import NumaPolicy
from tests.dataplane.serving import refused, serving
from tests.dataplane.shards import RECIPE, encode, noise, wait_until


def test_without_shared_memory_a_node_says_so_and_everything_still_maps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        node = Node(NodeConfig(memory_bytes=4 << 20, shm_dir=tmp_path / "missing"))
    try:
        assert "missing does not exist; wanted 4 MiB there" in caplog.text and "--shm-size" in caplog.text
        with Client(node.uri, timeout_s=20) as client, Reader(node.uri) as reader, Writer(node.uri) as writer:
            ref = client.put(bytes(range(256)) * 1024, name="big")
            assert len(bytes(range(256)) * 1024) >= PUT_IN_PLACE_FROM and not client._inplace_put._is_remote
            with writer.create("made", "int32", (5,)) as place:
                place.array[:] = range(5)
            assert place.ref is not None
            big, made = reader.resolve([ref, place.ref])
            assert reader.mapping() is not None
            assert big.tobytes() == bytes(range(256)) * 1024 and made.tolist() == [0, 1, 2, 3, 4]
            source = client.put_source(encode(noise(1)))
            assert client.derive([source], RECIPE)[0].name.startswith("d/")  # a worker maps it too
            del big, made
    finally:
        node.stop()


def test_a_reader_that_finds_another_file_under_the_path_copies_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = Node(NodeConfig(memory_bytes=1 << 20))
    try:
        real = LeaseSession._map

        def elsewhere(self: LeaseSession) -> None:
            other = tmp_path / "other"
            other.write_bytes(bytes(1 << 20))
            self.node.hello["segments"][0]["path"] = str(other)
            real(self)

        monkeypatch.setattr(LeaseSession, "_map", elsewhere)
        with Client(node.uri) as client, Reader(node.uri) as reader:
            ref = client.put(np.arange(10, dtype=np.int64), name="ten", dtype="int64")
            assert reader.mapping() is None
            assert reader.resolve([ref])[0].tolist() == list(range(10))
    finally:
        node.stop()


def test_a_segment_that_a_reaper_took_for_a_dead_ones_gets_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        names.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        if len(names) == 1:
            raise BlockingIOError
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    segment = Segment(1 << 20, "taken", tmp_path)
    Path(names[0]).unlink(missing_ok=True)  # the reaper comes to it only now
    assert names == [names[0], str(segment.path)] and segment.path.exists() and names[0] != names[1]
    segment.unlink()
    assert not list(tmp_path.iterdir())


def test_a_segment_that_its_node_removes_before_it_is_locked_is_not_a_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, flock = Segment(1 << 20, "ends", tmp_path), fcntl.flock

    def end_and_lock(fd: int, operation: int) -> None:
        segment.unlink()
        del segment.bytes, segment.map  # as at the end of its process; the map has the lock too
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", end_and_lock)
    assert reap_dead_segments(tmp_path) == [] and not list(tmp_path.iterdir())


def test_files_of_other_users_with_the_name_of_a_segment_stay_and_keep_no_node_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    left, foreign = tmp_path / f"dataplane-{user}-dead-1", tmp_path / f"dataplane-{user + 1}-dead-1"
    for path in (left, foreign):
        path.touch(mode=0o600)
    os.mkfifo(tmp_path / f"dataplane-{user}-pipe")
    (tmp_path / f"dataplane-{user}-link").symlink_to(tmp_path / "nothing")
    (tmp_path / f"dataplane-{user}-folder").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: user + 1)  # the file with this user's number in its name is another's
        assert reap_dead_segments(tmp_path) == []
    assert reap_dead_segments(tmp_path) == [left.name]
    assert foreign.exists() and len(list(tmp_path.iterdir())) == 4


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file to another user")
def test_all_segments_of_dead_nodes_go_beside_files_that_cannot_be_opened(tmp_path: Path) -> None:
    dead = {f"dataplane-{os.getuid()}-dead-{number}" for number in range(20)}
    for name in dead:
        (tmp_path / name).touch()
        (tmp_path / name.replace("dead", "link")).symlink_to("nowhere")
    assert set(reap_dead_segments(tmp_path)) == dead
    assert len(list(tmp_path.iterdir())) == 20


def test_a_node_starts_beside_a_file_that_another_user_put_in_its_way(tmp_path: Path) -> None:
    foreign = tmp_path / f"dataplane-{os.getuid()}-foreign-1"
    foreign.touch(mode=0o666)
    os.chown(foreign, 65534, 65534)
    node = Node(NodeConfig(memory_bytes=1 << 20, shm_dir=tmp_path))
    node.stop()
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_leftover_that_cannot_be_removed_keeps_no_node_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"dataplane-{os.getuid()}-dead-1").touch(mode=0o600)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert reap_dead_segments(tmp_path) == []
    assert "dead-1 of a dead node stays" in caplog.text


def test_memory_that_is_freed_after_a_second_wish_is_trimmed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[float] = []

    class Libc:
        def malloc_trim(self, _pad: int) -> None:
            trimmed.append(time.monotonic())

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    trimmer = Trimmer(wait_s=0.2)
    trimmer.request()
    time.sleep(0.15)
    asked = time.monotonic()
    trimmer.request()
    wait_until(lambda: bool(trimmed) and trimmed[-1] >= asked + 0.2)


def policy_of(segment: Path, process: int | None = None) -> tuple[str, set[int]]:
    """Return the memory policy that the system reports for the pages of a segment in a process, this one by default:
    its mode and its NUMA nodes."""
    (policy,) = (
        line.split()[1]
        for line in Path(f"/proc/{process or 'self'}/numa_maps").read_text().splitlines()
        if f"file={segment}" in line.split()
    )
    mode, nodes = policy.split(":")  # the nodes as ranges: 0-1,4
    ranges = [span.split("-") for span in nodes.split(",")]
    return mode, {node for span in ranges for node in range(int(span[0]), int(span[-1]) + 1)}


def test_numa_policies_are_applied_and_refused_with_what_there_is() -> None:
    assert NumaPolicy.parse("bind:0").nodes == (0,) and str(NumaPolicy.parse("interleave")) == "interleave"
    for text in ("bind:999", "bind", "both", ""):
        with pytest.raises(ValueError, match="wanted interleave or bind:N"):
            NumaPolicy.parse(text)
    for policy in (NumaPolicy.parse("bind:0"), NumaPolicy.parse("interleave")):
        try:
            segment = Segment(1 << 20, "numa", numa=policy)
        except BadRequestError as error:
            assert "leave --numa away" in str(error)
        else:
            assert not segment.bytes.any()
            assert policy_of(segment.path) == (policy.mode, set(policy.nodes))
            segment.unlink()
    with pytest.raises(BadRequestError, match="the kernel refuses"):
        Segment(1 << 20, "numa", numa=NumaPolicy("bind", (900,)))


def test_a_node_places_its_memory_as_it_is_told_and_says_so(tmp_path: Path) -> None:
    try:
        Segment(1 << 20, "numa", numa=NumaPolicy.parse("bind:0")).unlink()
    except BadRequestError:
        assert "leave --numa away" in refused("--numa", "bind:0")
        pytest.skip("the kernel refuses to place memory, so where it is cannot be read back")
    with serving(tmp_path / "log", "--numa", "bind:0") as served, Client(served.uri) as client:
        (segment,) = client.stat()["segments"]
        assert segment["numa"] == "bind:0"
        assert policy_of(segment["path"], served.process.pid) == ("bind", {0})


@pytest.mark.parametrize(("policy", "mode"), [(NumaPolicy("bind", (0, 65)), 2), (NumaPolicy("interleave", (1,)), 3)])
def test_the_system_is_asked_for_the_policy_and_its_nodes(
    policy: NumaPolicy, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the arguments of mbind(2), because many containers refuse the call itself (the test above reads the policy
    back where they do not)."""
    calls: list[tuple[Any, ...]] = []

    class Libc:
        def syscall(self, *arguments: Any) -> int:
            calls.append(arguments)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    policy.apply(1 << 20, 4096)
    ((number, address, nbytes, found, words, num_bits, flags),) = calls
    assert (number.value, address.value, nbytes.value, found.value, flags.value) == (237, 1 << 20, 4096, mode, 0)
    assert {at for at in range(num_bits.value) if words[at // 64] >> at % 64 & 1} == set(policy.nodes)
