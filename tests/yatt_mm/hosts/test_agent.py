"""Tests of what an agent keeps on its host: it is there, is watched, and goes with the agent, however that ends."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataplane.client.client import Client
from tests.dataplane.shards import wait_until
from tests.yatt_mm import runs
from yatt_mm.common.errors import WorkerError
from yatt_mm.common.progress import LAYOUT, start_ticks
from yatt_mm.hosts.agent import HostAgent, unreachable
from yatt_mm.hosts.orders import HostOrder, NodeSettings
from yatt_mm.hosts.run_node import node_token
from yatt_mm.hosts.scratch import Scratch

AGENT = """
import pickle, sys, time
from yatt_mm.hosts.agent import HostAgent
agent = HostAgent(order=pickle.loads(bytes.fromhex(sys.argv[1])), address="127.0.0.1")
print(agent.start().uri, file=sys.__stderr__, flush=True)
time.sleep(600)
"""


@pytest.fixture
def order(tmp_path: Path) -> Iterator[HostOrder]:
    runs.write_shard(tmp_path / "train-0.tar", range(4))
    (tmp_path / "nodes").mkdir(mode=0o700)
    scratch = Scratch(files=tmp_path / "yatt-there", weights=tmp_path / "yatt-weights-there")
    with node_token(tmp_path) as token_file:
        settings = NodeSettings(
            node_id="there",
            host="127.0.0.1",
            directory=str(tmp_path / "nodes"),
            token_file=str(token_file),
            scratch=str(scratch.files),
            memory_bytes=16 << 20,
            num_workers=1,
            roots={"train": [str(tmp_path / "train-*.tar")]},
            media_roots=[],
            index_dir=None,
            spill_in=str(scratch.files),
            spill_bytes=16 << 20,
        )
        yield HostOrder(number=1, scratch=scratch, node=settings, scope="run-test", log_dir=tmp_path / "logs")


@pytest.fixture
def agent(order: HostOrder, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostAgent]:
    monkeypatch.setattr("yatt_mm.hosts.agent.write_output_to", lambda path: None)  # it is that of the tests here
    made = HostAgent(order=order, address="127.0.0.1")
    yield made
    made.stop()


def node_process(uri: str) -> psutil.Process:
    """Return the process of a node."""
    port = uri.rpartition(":")[2]
    every = psutil.process_iter(["cmdline"])
    (found,) = [one for one in every if {port, "serve"} <= set(one.info["cmdline"] or ())]
    return found


def test_a_host_has_folders_and_a_node_as_long_as_its_agent_wants_them(agent: HostAgent, order: HostOrder) -> None:
    ready = agent.start()
    assert ready.interface == "lo"
    assert order.scratch.weights.is_dir() and (order.scratch.files.stat().st_mode & 0o777) == 0o700
    client = Client(ready.uri)
    assert client.ingest("train").num_samples == 4
    client.close()
    assert json.loads((Path(str(order.node.directory)) / "there.json").read_text())["uri"] == ready.uri
    node_process(ready.uri).kill()
    wait_until(lambda: agent.news().num_restarts == 1, 30)
    assert agent.news().last_restart_s > 0
    agent.stop()
    assert not order.scratch.files.exists() and not order.scratch.weights.exists()


def test_what_a_host_has_goes_with_an_agent_that_is_killed(order: HostOrder, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, pickle.dumps(order).hex()], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    wait_until(order.scratch.weights.is_dir, 30)
    wait_until(lambda: any((tmp_path / "nodes").glob("*.json")), 30)
    uri = json.loads((tmp_path / "nodes" / "there.json").read_text())["uri"]
    node = node_process(uri)
    for child in psutil.Process(process.pid).children():
        child.kill()  # as Ray does with those of an actor that ends
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not order.scratch.files.exists() and not order.scratch.weights.exists(), 30)
    assert not node.is_running()
    process.stderr.close()


def test_the_end_of_the_process_that_keeps_a_node_is_told_and_leaves_nothing(
    agent: HostAgent, order: HostOrder
) -> None:
    keeper = node_process(agent.start().uri).parent()
    assert keeper is not None
    keeper.kill()
    wait_until(lambda: "has ended" in agent.news().failure, 30)
    agent.stop()
    assert not order.scratch.files.exists() and not order.scratch.weights.exists()


def test_two_hosts_with_the_same_files_are_told(agent: HostAgent, order: HostOrder) -> None:
    order.scratch.files.mkdir()
    with pytest.raises(WorkerError, match="yatt-there is there already: it has the same files as another host"):
        agent.start()
    order.scratch.files.rmdir()


def test_what_a_part_has_done_is_read_on_its_host_and_signals_reach_it(agent: HostAgent, order: HostOrder) -> None:
    order.scratch.files.mkdir()
    child = subprocess.Popen(["sleep", "600"])
    (order.scratch.files / "progress-rank-3").write_bytes(LAYOUT.pack(child.pid, start_ticks(child.pid), 7, 1.5))
    done, none = agent.done(["training rank 3", "engine 3"])
    assert done is not None and (done.pid, done.count, none) == (child.pid, 7, None)
    agent.signal("engine 3", signal.SIGKILL)
    assert child.poll() is None
    agent.signal("training rank 3", signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM
    agent.signal("training rank 3", signal.SIGTERM)  # it is gone
    (order.scratch.files / "progress-rank-3").unlink()
    order.scratch.files.rmdir()


def test_a_port_that_is_closed_is_named(agent: HostAgent) -> None:
    port = agent.listen()
    assert agent.reach({"host a": ("127.0.0.1", port)}) == []
    agent.stop_listening()
    assert unreachable({"host a": ("127.0.0.1", port)}) == [f"host a at port {port} (Connection refused)"]
