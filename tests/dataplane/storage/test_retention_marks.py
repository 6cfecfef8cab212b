"""Tests of the marks that keep a durable object: damage, a second file of the same object, scopes that change or close,
and what is synced when."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from dataplane.client.client import Client
from dataplane.core.errors import MissingObjectError
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage import disk_files

MIB = 1 << 20


def started(folder: Path) -> Node:
    """A node in this process, with 2 MiB of memory and 64 MiB of disk."""
    return Node(NodeConfig(memory_bytes=2 * MIB, spill_dir=folder, spill_bytes=64 * MIB, node_id="one"))


def scope_state(folder: Path) -> dict[str, Any]:
    """Return the saved state of the only scope on this disk."""
    (path,) = folder.glob("durable/keeps/*/scope.json")
    return dict(json.loads(path.read_text()))


def test_a_second_file_of_an_object_does_not_come_back_when_the_object_is_released(tmp_path: Path) -> None:
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        ref = client.put(b"twice" * 1000, name="twice", durable=True)
        client.open_scope("kept")
        other = client.put(b"other" * 1000, name="other", durable=True, scope="kept")
        (first,) = (tmp_path / "durable" / "objects").glob(f"{blake3(b'twice').hexdigest()[:24]}-*")
        node.stop()  # while its client is there: the scope stays
    second = first.with_name(first.stem[:-16] + "0" * 16 + ".arrow")
    shutil.copyfile(first, second)
    for folder in (tmp_path / "durable" / "keeps").iterdir():
        (folder / second.stem).touch()
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        assert client.get(ref) == b"twice" * 1000 and client.stat()["num_objects"] == 2
        assert not second.exists() and first.exists()
        assert not list(tmp_path.glob(f"durable/keeps/*/{second.stem}"))
        assert client.release([ref]) == 1
    node.stop()
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        assert client.stat()["num_objects"] == 1 and client.get(other) == b"other" * 1000
    node.stop()


@pytest.mark.parametrize("harm", ["empty", "gone", "other"])
def test_durable_objects_of_a_scope_whose_state_is_damaged_are_held_instead(tmp_path: Path, harm: str) -> None:
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("kept")
        refs = [client.put(bytes([at]) * 5000, name=f"kept/{at}", durable=True, scope="kept") for at in range(3)]
        node.stop()  # while its client is there: the scope stays
    (state,) = tmp_path.glob("durable/keeps/*/scope.json")
    if harm == "gone":
        state.unlink()
    else:
        state.write_text("" if harm == "empty" else '["what is this"]')
    for _ in range(2):
        node = started(tmp_path)
        with Client(node.uri, timeout_s=10) as client:
            assert [client.get(ref) for ref in refs] == [bytes([at]) * 5000 for at in range(3)]
            assert client.stat()["num_durable"] == 3 and not client.stat()["num_scopes"]
        node.stop()
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        assert client.release(refs) == 3
    node.stop()
    assert not list(tmp_path.glob("durable/objects/*.arrow")) and not list(tmp_path.glob("durable/keeps/*/*"))


def test_a_node_that_cannot_read_who_keeps_what_does_not_start_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("kept")
        ref = client.put(b"kept" * 1000, name="kept", durable=True, scope="kept")
        node.stop()  # while its client is there: the scope stays
    real = Path.read_text

    def fail(path: Path, *args: Any) -> str:
        if path.name == "scope.json":
            raise OSError(5, "Input/output error")
        return real(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        found = disk_files.DiskFiles(tmp_path, MIB, "one")
        with pytest.raises(OSError, match="Input/output error"):
            next(found.recover())
        found.close()
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        assert client.get(ref) == b"kept" * 1000 and client.stat()["num_scopes"] == 1
    node.stop()


def test_what_a_durable_put_needs_after_a_power_cut_is_synced_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def note(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    node = started(tmp_path)
    durable = tmp_path / "durable"
    assert {tmp_path, durable, durable / "keeps"} <= set(synced)
    synced.clear()
    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("kept")
        client.put(b"kept" * 1000, name="kept", durable=True, scope="kept")
        (folder,) = (path.parent for path in tmp_path.glob("durable/keeps/*/scope.json"))
        assert folder / ".scope.json" in synced and {durable / "keeps", durable / "objects", folder} <= set(synced)
        assert synced.index(folder / ".scope.json") < synced.index(folder)
        synced.clear()
        client.put(b"more" * 1000, name="more", durable=True, scope="kept")
        assert len(synced) == 3, "the file, the folder of files and that of the scope"
    node.stop()


def test_what_a_scope_says_of_itself_on_disk_is_always_the_newest(tmp_path: Path) -> None:
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("step")
        client.put(b"x" * 1000, name="x", durable=True, scope="step")
        assert len(scope_state(tmp_path)["owners"]) == 1
        with Client(node.uri, timeout_s=10) as other:
            other.open_scope("step")
            assert len(scope_state(tmp_path)["owners"]) == 2
        client.release_names(["x"])
        node.stop()
    assert scope_state(tmp_path)["owners"], "left by a node that ended in the middle"
    node = started(tmp_path)
    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("step", quota_bytes=MIB)
        client.put(b"y" * 1000, name="y", durable=True, scope="step")
        assert scope_state(tmp_path)["quota_bytes"] == MIB
    node.stop()


def test_a_scope_that_closes_while_a_durable_object_is_written_into_it_leaves_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started(tmp_path)
    real = disk_files.write_ipc

    def close_then_write(*args: Any) -> int:
        if "step" in json.dumps(args[2]):
            node.services.store.scopes.close("step")
        return real(*args)

    with Client(node.uri, timeout_s=10) as client:
        client.open_scope("step")
        kept = client.put(b"kept" * 1000, name="kept", durable=True)
        client.put(b"first" * 1000, name="first", durable=True, scope="step")
        with monkeypatch.context() as patched:
            patched.setattr(disk_files, "write_ipc", close_then_write)
            with pytest.raises(MissingObjectError, match="closed while an object was being written"):
                client.put(b"step" * 1000, name="step/2", durable=True, scope="step")
        assert [path.name for path in (tmp_path / "durable" / "keeps").iterdir()] == ["held"]
        assert len(list((tmp_path / "durable" / "objects").iterdir())) == 1
        assert client.stat()["num_objects"] == 1 and client.get(kept) == b"kept" * 1000
        assert client.stat()["used_bytes"] <= 8192
    node.stop()
