"""Tests that devices that Ray reserves are named by their own ids, not by their numbers in the run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from yatt_mm.common.errors import ConfigError, WorkerError
from yatt_mm.common.held_memory import GPUS_VARIABLE
from yatt_mm.hosts.devices import Devices, reserved_devices
from yatt_mm.runtime import cluster
from yatt_mm.runtime.cluster import _our_signals, asks_for_no_token


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Make Ray believe that this machine has three GPUs. No GPU is used."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,GPU-7a")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="yatt-ray-", ignore_cleanup_errors=True) as folder:
        with _our_signals():
            cluster._start(Path(folder), num_cpus=4, num_gpus=3)
        yield ("4", "6", "GPU-7a")
        ray.shutdown()


@pytest.fixture
def handler() -> Iterator[object]:
    """A handler of SIGTERM, as the launcher has one before it starts Ray."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGTERM, before)


@pytest.mark.alone
def test_a_run_uses_the_gpus_that_ray_gave_it_and_keeps_its_signals(
    handler: object, three_gpus: tuple[str, ...]
) -> None:
    assert signal.getsignal(signal.SIGTERM) is handler
    groups = {os.getpgid(process.pid) for process in psutil.Process().children() if "ray" in process.name()}
    assert groups and os.getpgrp() not in groups
    assert asks_for_no_token(), "this one was started without"
    with reserved_devices(2, deadline_s=60.0) as mine:
        assert set(mine.gpus) < {*three_gpus} and len(set(mine.gpus)) == 2
        variables = mine.beside([1, 0])["runtime_env"]["env_vars"]
        assert variables == dict.fromkeys(("CUDA_VISIBLE_DEVICES", GPUS_VARIABLE), f"{mine.gpus[1]},{mine.gpus[0]}")
        with reserved_devices(1, deadline_s=60.0) as others:
            assert {*mine.gpus, *others.gpus} == {*three_gpus}
        with pytest.raises(WorkerError, match=r"lower placement\.num_devices or free devices"):
            with reserved_devices(2, deadline_s=0.5):
                pass


def test_a_node_of_ray_that_is_slow_to_appear_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get_node(node: str) -> str:
        asked.append(node)
        if len(asked) < 4:
            raise RuntimeError("it is not there")
        return node

    monkeypatch.setattr(services, "get_node", get_node)
    with cluster._watched_start(60.0):
        assert services.get_node("one") == "one"
    assert services.get_node is get_node and len(asked) == 4
    asked.clear()
    with cluster._watched_start(0.0), pytest.raises(cluster._NotStartedError, match="its node did not appear in 0 s"):
        services.get_node("one")


def longest_scratch(parent: Path) -> Path:
    """Return the path in `parent` with which a socket of Ray's object store has the longest path that Linux allows."""
    session = f"session_2026-11-24_08-30-00_000000_{os.getpid()}"
    return parent / ("x" * (107 - len(str(parent / "ray" / session / "sockets" / "plasma_store")) - 1))


def test_a_temporary_folder_that_is_too_long_for_the_sockets_of_ray_is_told_before_the_start() -> None:
    folder = longest_scratch(Path("/tmp"))
    wanted = f"{tempfile.gettempdir()} has {len(tempfile.gettempdir())} bytes, 1 too many for .* set TMPDIR to a"
    with pytest.raises(ConfigError, match=wanted):
        with cluster.ray_session(None, num_cpus=1, scratch=folder.with_name(f"{folder.name}x"), env={}):
            pass


@pytest.mark.alone
def test_ray_is_started_again_if_a_server_ends_before_it_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raylets: list[Any] = []

    class FirstRayletDies(services.ConsolePopen):  # type: ignore[misc]
        def __init__(self, command: list[str], *arguments: Any, **options: Any) -> None:
            super().__init__(command, *arguments, **options)
            if Path(command[0]).name == "raylet":
                raylets.append(self)
                if len(raylets) == 1:
                    self.kill()

    monkeypatch.setattr(services, "ConsolePopen", FirstRayletDies)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
    others = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory(prefix="yt-", ignore_cleanup_errors=True) as temporary:
        folder = longest_scratch(Path(temporary))
        folder.mkdir()
        with cluster.ray_session(None, num_cpus=1, scratch=folder, env={}):
            assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60) == 7
            gcs = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
            assert len(set(gcs) - others) == 1, "that of the first attempt is gone"
            assert not asks_for_no_token() and "RAY_AUTH_TOKEN" not in os.environ
    assert caplog.text.count("its raylet ended with status -9") == 1 and "it is started again" in caplog.text
    assert len(raylets) == 1 + caplog.text.count("it is started again"), "the second one may be late"


def test_on_a_machine_without_gpus_nothing_is_said_of_them() -> None:
    devices = Devices(group=None, bundles=(0,), nodes=(), per_host=1, gpus=())  # type: ignore[arg-type]
    assert "runtime_env" not in devices.beside([0])
