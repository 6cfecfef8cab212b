"""Tests that objects without room in memory go to disk and are mapped from there, and that durable objects survive
their node."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core import disk_sync
from dataplane.core.errors import BadRequestError, ChecksumError, MissingObjectError, OutOfSpaceError
from dataplane.core.refs import Ref
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.disk_files import DiskFiles
from tests.dataplane.shards import wait_until

MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node in this process, with 2 MiB of memory and 8 MiB of disk."""
    started = Node(NodeConfig(memory_bytes=2 * MIB, spill_dir=tmp_path / "spill", spill_bytes=8 * MIB))
    yield started
    started.stop()


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(node.uri, timeout_s=60) as opened:
        yield opened


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that were synced to the disk, in order."""
    paths: list[Path] = []
    real = disk_sync._sync

    def sync(path: Path, flags: int) -> None:
        paths.append(path)
        real(path, flags)

    monkeypatch.setattr(disk_sync, "_sync", sync)
    return paths


def test_an_unsynced_object_waits_for_no_disk_and_survives_its_node(
    node: Node, client: Client, tmp_path: Path, synced: list[Path]
) -> None:
    client.put(b"rollout", name="rollout", durable="unsynced")
    assert synced == []
    assert client.stat()["num_durable"] == 1
    node.stop()
    again = Node(NodeConfig(memory_bytes=2 * MIB, spill_dir=tmp_path / "spill", spill_bytes=8 * MIB))
    try:
        with Client(again.uri, timeout_s=60) as other:
            assert other.get("rollout") == b"rollout"
    finally:
        again.stop()


def test_a_node_that_is_stopped_twice_leaves_the_next_one_on_its_directory_alone(node: Node, tmp_path: Path) -> None:
    node.stop()
    following = DiskFiles(tmp_path / "spill", MIB, "following")
    try:
        ref = Ref(name="a", kind="plain", dtype="uint8", shape=(5,), nbytes=5, node="following", lineage=None)
        file = following.write(ref, "digest", np.arange(5, dtype=np.uint8))
        node.stop()
        assert file.path.exists()
        assert os.fstat(following._lock.fileno()).st_ino == (tmp_path / "spill" / "lock").stat().st_ino
        with pytest.raises(BadRequestError, match="is used by node following"):
            DiskFiles(tmp_path / "spill", MIB, "third")
    finally:
        following.close()


def test_an_unsynced_object_that_is_put_again_as_durable_is_synced(
    client: Client, tmp_path: Path, synced: list[Path]
) -> None:
    first = client.put(b"same", name="same", durable="unsynced")
    assert synced == []
    assert client.put(b"same", name="same", durable=True) == first
    (file,) = (tmp_path / "spill" / "durable" / "objects").glob("*.arrow")
    assert {file, file.parent} <= set(synced)


def test_another_word_for_durable_is_refused(client: Client) -> None:
    with pytest.raises(BadRequestError, match=r"put\.durable is 'maybe'; wanted true, false or \"unsynced\""):
        client.put(b"x", name="x", durable="maybe")  # type: ignore[arg-type]


def test_plain_objects_spill_instead_of_being_refused_and_read_back_from_their_files(
    node: Node, client: Client
) -> None:
    data = [np.random.default_rng(at).integers(0, 256, MIB // 2, dtype=np.uint8) for at in range(8)]
    refs = [client.put(part, name=f"part/{at}") for at, part in enumerate(data)]
    stat = client.stat()
    assert stat["num_spilled"] == 4 and 2 * MIB <= stat["spilled_bytes"] <= 3 * MIB
    with Reader(node.uri) as reader:
        views = reader.resolve(refs)
        for view, part in zip(views, data, strict=True):
            assert np.array_equal(view, part) and not view.flags.writeable
            assert view.__array_interface__["data"][0] % 64 == 0
        assert client.get(refs[0]) == data[0].tobytes()
        many = reader.resolve(refs * 5)
        assert all(np.array_equal(many[at], data[at % 8]) for at in range(40))
        del many, view
        assert client.release(refs) == 8
        assert all(np.array_equal(view, part) for view, part in zip(views, data, strict=True))
        del views
        wait_until(lambda: client.stat()["num_leases"] == 0)
    assert client.stat()["spilled_bytes"] == 0 == client.stat()["used_bytes"]
    folder = node.config.spill_dir / "spill"  # type: ignore[operator]
    wait_until(lambda: not list(folder.iterdir()))  # they are unlinked after they are counted off


def test_a_spilled_object_is_an_arrow_file_that_any_client_can_follow(node: Node, client: Client) -> None:
    first = client.put(np.arange(MIB // 4, dtype=np.float32), name="first", dtype="float32")
    client.put(bytes(2 * MIB - 4096), name="rest")
    flight = fl.FlightClient(node.uri)
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "resolve"}'))
    reader.read_chunk()
    writer.write_metadata(pa.py_buffer(json.dumps({"names": ["first", "rest"]}).encode()))
    chunk = reader.read_chunk()
    row, files = chunk.data.to_pylist()[0], json.loads(chunk.app_metadata.to_pybytes())["files"]
    assert row["segment"] == 1 and row["offset"] % 4096 == 0 and row["version"] == first.version
    with pa.memory_map(files[0]["path"]) as source:
        column = pa.ipc.open_file(source).read_all().column("data").combine_chunks()
        assert np.array_equal(column.to_numpy().view("float32"), np.arange(MIB // 4, dtype=np.float32))
    raw = Path(files[0]["path"]).read_bytes()[row["offset"] : row["offset"] + row["nbytes"]]
    assert raw == np.arange(MIB // 4, dtype=np.float32).tobytes()
    writer.close()
    flight.close()


def test_when_the_disk_budget_is_full_a_put_fails_with_the_numbers_and_loses_nothing(
    node: Node, client: Client
) -> None:
    refs = []
    with pytest.raises(OutOfSpaceError, match=r"held_bytes=\d+ .*spilled_bytes=\d+ spill_budget_bytes=8388608"):
        for at in range(20):
            client.timeout_s = 60 if at < 8 else 3  # one of the last waits in vain
            refs.append(client.put(bytes([at]) * MIB, name=f"full/{at}"))
    client.timeout_s = 60
    assert 8 <= len(refs) <= 9
    assert all(client.get(ref) == bytes([at]) * MIB for at, ref in enumerate(refs))


def test_a_disk_that_refuses_files_is_named_and_loses_nothing(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    kept = client.put(b"a" * 2 * MIB, name="kept")
    with monkeypatch.context() as patched:
        patched.setattr("dataplane.storage.disk_files.write_ipc", full)
        client.timeout_s = 3
        with pytest.raises(OutOfSpaceError, match="No space left on device"):
            client.put(b"b" * MIB, name="more")
        with pytest.raises(OutOfSpaceError, match="does not take another file"):
            client.put(b"c", name="durable", durable=True, scope=None)
    client.timeout_s = 60
    assert client.get(kept) == b"a" * 2 * MIB
    wait_until(lambda: client.stat()["num_leases"] == 0)
    assert client.stat()["spilled_bytes"] == 0 and client.stat()["num_objects"] == 1


@pytest.mark.parametrize("harm", ["bytes", "cut", "gone"])
def test_a_damaged_file_is_an_error_and_never_wrong_bytes(node: Node, client: Client, harm: str) -> None:
    ref = client.put(b"a" * MIB, name="harmed")
    client.put(b"b" * 2 * MIB, name="other")
    path = next((node.config.spill_dir / "spill").iterdir())  # type: ignore[operator]
    if harm == "bytes":
        with path.open("r+b") as file:
            file.seek(MIB // 2)
            file.write(b"x")
    elif harm == "cut":
        os.truncate(path, MIB // 2)
    else:
        path.unlink()
    with Reader(node.uri) as reader:
        with pytest.raises(ChecksumError, match=r"harmed is lost.*put it again"):
            reader.resolve([ref])
        with pytest.raises(MissingObjectError):
            reader.resolve([ref])
    wait_until(lambda: client.stat()["num_leases"] == 0)
    client.put(b"a" * 1000, name="harmed")


def test_what_a_full_disk_does_not_take_is_not_called_evictable(node: Node, client: Client) -> None:
    with pytest.raises(OutOfSpaceError, match=r"held_bytes=[1-9]\d* evictable_bytes=0 .*--spill-size"):
        for at in range(16):
            client.timeout_s = 60 if at < 8 else 3  # one of the last waits in vain
            client.put(bytes([at]) * MIB, name=f"held/{at}")
    client.timeout_s = 60
    client.release_names([f"held/{at}" for at in range(16)])


def test_objects_of_an_open_scope_stay_in_memory(node: Node, client: Client) -> None:
    client.open_scope("step")
    client.put(b"s" * MIB, name="scoped", scope="step")
    for at in range(4):
        client.put(bytes([at]) * MIB, name=f"held/{at}")
    assert client.stat()["num_spilled"] == 3
    entry = node.services.store.find("scoped")
    assert entry is not None and entry.slab is not None
    client.close_scope("step")


def embedded(folder: Path, node_id: str = "one") -> EmbeddedNode:
    return EmbeddedNode(memory_bytes=2 * MIB, roots={}, spill_dir=folder, node_id=node_id, restart=False)


def test_durable_objects_survive_the_kill_of_their_node_and_other_spilled_ones_do_not(tmp_path: Path) -> None:
    with embedded(tmp_path) as node, Client(node.uri, timeout_s=20) as client:
        client.open_scope("kept", quota_bytes=MIB)
        held = client.put(b"held" * 1000, name="held", durable=True, meta={"step": 3})
        scoped = client.put(b"scoped" * 1000, name="scoped", durable=True, scope="kept")
        joined = client.put(b"joined" * 1000, name="joined", durable=True, scope="kept")
        gone = client.put(b"gone" * 1000, name="gone", durable=True)
        source = client.put_source(b"source" * 1000, durable=True)
        client.release([gone])
        client.put(bytes(MIB), name="plain/1")
        client.put(bytes(2 * MIB - MIB // 4), name="plain/2")
        assert client.stat()["num_durable"] == 4 and client.stat()["num_spilled"] >= 1
        os.kill(node.pid, signal.SIGKILL)
        node._process._process.wait()
    with embedded(tmp_path) as node, Client(node.uri, timeout_s=20) as client, Reader(node.uri) as reader:
        stat = client.stat()
        assert (stat["num_durable"], stat["num_objects"], stat["num_scopes"], stat["used_bytes"]) == (4, 4, 1, 0)
        views = reader.resolve([held, scoped, joined, source])
        contents = [b"held" * 1000, b"scoped" * 1000, b"joined" * 1000, b"source" * 1000]
        assert [view.tobytes() for view in views] == contents
        assert client.put(b"held" * 1000, name="held").meta == {"step": 3}
        with pytest.raises(BadRequestError, match="exists with other content"):
            client.put(b"other", name="held")
        with pytest.raises(BadRequestError, match="quota_bytes=1048576"):
            client.open_scope("kept")
        assert client.close_scope("kept") == {"num_dropped": 2, "dropped_bytes": 6000 + 6000}
        assert views[1].tobytes() == b"scoped" * 1000
        del views
    with embedded(tmp_path) as node, Client(node.uri) as client:
        assert client.stat()["num_durable"] == 2
        client.release([held, source])
        client.release([source])
    with embedded(tmp_path) as node, Client(node.uri) as client:
        assert client.stat()["num_durable"] <= 1 and not client.stat()["num_scopes"]


def test_a_durable_object_that_is_put_again_stays_whole_in_every_scope_it_is_in(tmp_path: Path) -> None:
    data = b"again" * 10_000
    with embedded(tmp_path) as node, Client(node.uri, timeout_s=20) as client, Reader(node.uri) as reader:
        for scope in ("one", "two"):
            client.open_scope(scope)
        client.put(b"later" * 1000, name="later")
        ref = client.put(data, name="again", durable=True, scope="one")
        cold = client.put(data, name="cold", durable=True)
        client.release([client.put(bytes(2 * MIB - 60_000), name="flood")])  # leaves no room for what is cold
        for turn in range(3):
            assert client.put(data, name="again", durable=True, scope="one") == ref, turn
            assert client.put(data, name="cold", durable=True) == cold
            assert reader.resolve([cold])[0].tobytes() == data
            assert reader.resolve([ref])[0].tobytes() == data
        client.put(data, name="again", scope="two")
        client.put(b"later" * 1000, name="later", durable=True)
        with pytest.raises(BadRequestError, match="exists with other content"):
            client.put(b"x" * 1000, name="again", durable=True)
        client.close_scope("one")
        assert client.stat()["num_durable"] == 3 and client.stat()["num_spilled"] >= 1
        os.kill(node.pid, signal.SIGKILL)
        node._process._process.wait()
    with embedded(tmp_path) as node, Client(node.uri, timeout_s=20) as client:
        assert client.get(ref) == data == client.get("cold") and client.get("later") == b"later" * 1000
        assert len(list((tmp_path / "durable" / "objects").iterdir())) == 3
        assert client.close_scope("two")["num_dropped"] == 1
        assert client.release_names(["later", "cold"]) == 2
        wait_until(lambda: client.stat()["num_leases"] == 0)
        assert client.stat()["spilled_bytes"] == 0
        wait_until(lambda: not list((tmp_path / "durable" / "objects").iterdir()))


def test_concurrent_durable_puts_share_syncs_and_all_of_them_are_there(
    node: Node, client: Client, tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refs, sync = [], disk_sync._sync

    def slow(path: Path, flags: int) -> None:
        time.sleep(0.05)  # so that others come meanwhile
        sync(path, flags)

    monkeypatch.setattr(disk_sync, "_sync", slow)

    def write(seed: int) -> None:
        for at in range(5):
            refs.append(client.put(bytes([seed]) * 5000, name=f"durable/{seed}/{at}", durable=True))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refs) == 30 and client.stat()["num_durable"] == 30
    assert 5 <= synced.count(tmp_path / "spill" / "durable" / "objects") < 25
    assert client.release(refs) == 30
    assert client.stat()["spilled_bytes"] == 0


def test_two_nodes_do_not_share_a_folder_and_leftovers_are_removed(tmp_path: Path, node: Node) -> None:
    with pytest.raises(BadRequestError, match=r"is used by node .* directory of its own"):
        Node(NodeConfig(memory_bytes=MIB, spill_dir=tmp_path / "spill"))
    with pytest.raises(BadRequestError, match="start it with --spill"):
        other = Node(NodeConfig(memory_bytes=MIB))
        try:
            with Client(other.uri) as client:
                client.put(b"x", name="x", durable=True)
        finally:
            other.stop()
    (tmp_path / "dead" / "spill").mkdir(parents=True)
    (tmp_path / "dead" / "spill" / "old.arrow").write_bytes(b"x")
    other = Node(NodeConfig(memory_bytes=MIB, spill_dir=tmp_path / "dead"))
    assert not list((tmp_path / "dead" / "spill").iterdir())
    other.stop()
    (tmp_path / "file").touch()
    with pytest.raises(OutOfSpaceError, match="cannot be written"):
        Node(NodeConfig(memory_bytes=MIB, spill_dir=tmp_path / "file"))


def test_a_durable_put_that_comes_again_after_a_kill_loses_nothing(tmp_path: Path) -> None:
    made = EmbeddedNode(memory_bytes=2 * MIB, roots={}, spill_dir=tmp_path, node_id="one")
    with made as node, Client(node.uri, timeout_s=60) as client:
        for _ in range(3):
            ref = client.put(b"again" * 1000, name="again", durable=True)
            client.open_scope("keeps")
            client.put(b"again" * 1000, name="again", durable=True, scope="keeps")
            assert client.stat()["num_durable"] == 1
            assert len(list(tmp_path.glob("**/durable/objects/*.arrow"))) == 1
            before = node.num_restarts
            os.kill(node.pid, signal.SIGKILL)
            wait_until(lambda before=before: node.num_restarts > before, 60)
            assert client.get(ref) == b"again" * 1000
        client.close_scope("keeps")
        assert client.get(ref) == b"again" * 1000
        client.release([ref])
        wait_until(lambda: client.stat()["num_leases"] == 0)  # the get's end once gRPC has sent it
        wait_until(lambda: not list(tmp_path.glob("**/*.arrow")))


def test_a_durable_object_whose_description_was_changed_is_set_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = NodeConfig(memory_bytes=2 * MIB, spill_dir=tmp_path, spill_bytes=8 * MIB)
    node = Node(config)
    with Client(node.uri, timeout_s=60) as client:
        client.put(np.arange(6, dtype=np.uint8), name="changed", shape=(2, 3), durable=True)
        client.put(b"whole", name="whole", durable=True)
    node.stop()
    path = next(
        path for path in (tmp_path / "durable" / "objects").iterdir() if b'"name":"changed"' in path.read_bytes()
    )
    path.write_bytes(path.read_bytes().replace(b'"shape":[2,3]', b'"shape":[3,2]'))
    node = Node(config)
    try:
        with Client(node.uri, timeout_s=60) as client:
            assert client.get("whole") == b"whole"
            with pytest.raises(MissingObjectError):
                client.get("changed")
    finally:
        node.stop()
    assert path.with_suffix(".damaged").exists()
    assert f"the description in {path} has checksum" in caplog.text and '"name":"changed"' in caplog.text
