"""Tests of the process of a parser: what it may see and do, and that nothing of it is left after its node."""

import json
import threading
from pathlib import Path

import psutil
import pytest

from dataplane.client.client import Client
from dataplane.core.errors import DataPlaneError, NodeTimeoutError
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.formats.parser import READING
from dataplane.datasets.parsing.pool import ParserPool
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.datasets.faulty_parsers import FAULT, TABLE, file_of, hook
from tests.dataplane.serving import serving
from tests.dataplane.shards import has_ended, wait_until
from tests.dataplane.tables import hugging_face_table, write_lines, write_parquet


def test_a_parser_has_no_secrets_no_network_and_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    code = f"""
import atexit, os, socket, json
from dataplane.datasets.parsing.tasks import Tasks
real = Tasks.run
def link(fd):
    path = "/proc/self/fd/" + fd
    return os.readlink(path) if os.path.lexists(path) and int(fd) > 2 else ""
def tried(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return str(error)
    return "done"
def run(self, task, file, arguments):
    found = dict(
        environment=dict(os.environ),
        socket=tried(socket.socket),
        program=tried(os.execv, "/bin/true", ["true"]),
        kill=tried(os.kill, os.getppid(), 0),
        open=sorted(map(link, os.listdir("/proc/self/fd"))),
    )
    open({str(said)!r}, "w").write(json.dumps(found))
    return real(self, task, file, arguments)
Tasks.run = run
"""
    hook(monkeypatch, tmp_path, code)
    for name in ("DATAPLANE_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "secret-value")
    pool = ParserPool()
    try:
        Catalog({"d": [str(write_lines(tmp_path / "a.jsonl", [{"n": 1}]))]}, "node", parser=pool).ingest("d")
    finally:
        pool.close()
    found = json.loads(said.read_text())
    assert "secret-value" not in str(found["environment"])
    assert [found[key] for key in ("socket", "program", "kill")] == ["[Errno 1] Operation not permitted"] * 3
    names = [name for name in found["open"] if name]
    assert [name.split(":")[0] for name in names] == [str(tmp_path / "a.jsonl"), "socket"]


def test_nothing_of_the_parsers_is_left_after_the_end_of_a_node(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", hugging_face_table([b"x"]))
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"d": [str(tmp_path / "a.parquet")]}))
    try:
        assert len(node.services.datasets.samples("d", [0])[0].media) == 1
        assert node.stat()["num_parsers"] == 1 and node.stat()["num_parser_restarts"] == 0
        (pid,) = node.services.parsers.pids()
        process = psutil.Process(pid)
    finally:
        node.stop()
    assert has_ended(process) and node.stat()["num_parsers"] == 0
    with pytest.raises(NodeTimeoutError, match="the node is stopping"):
        node.services.datasets._parser.call("table", file_of(tmp_path / "a.parquet"), TABLE, print, READING)


def test_the_parsers_of_a_node_that_is_killed_end_with_it_also_in_the_middle_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(
        monkeypatch,
        tmp_path,
        FAULT.format(fault=f"open({str(tmp_path / 'started')!r}, 'x').close() or time.sleep(600)"),
    )
    write_lines(tmp_path / "bad.jsonl", [{"n": at} for at in range(5)])
    are_gone = False
    with pytest.raises(AssertionError), serving(tmp_path / "log", "--root", f"d={tmp_path}/bad.jsonl") as served:
        with Client(served.uri, timeout_s=60) as client:
            client.ingest("d")
            asking = threading.Thread(target=ask_in_vain, args=(served.uri,))
            asking.start()
            wait_until((tmp_path / "started").exists)
        command = "dataplane.datasets.parsing.process_main"
        parsers = [child for child in psutil.Process(served.process.pid).children() if command in child.cmdline()]
        assert len(parsers) == 1
        served.process.kill()
        wait_until(lambda: all(map(has_ended, parsers)), 20)
        asking.join(60)
        are_gone = not asking.is_alive()
        served.process.wait(60)
        assert served.process.returncode == 0, "killed"
    assert are_gone


def ask_in_vain(uri: str) -> None:
    with pytest.raises(DataPlaneError), Client(uri, timeout_s=20) as client:
        client.samples("d", [0])
