"""Tests that no other process can enter a run: what listens beyond the loopback address asks for the run's token."""

from __future__ import annotations

import http.client
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.core.errors import UnauthenticatedError
from tests.yatt_mm import runs

pytestmark = [pytest.mark.alone, pytest.mark.faults]

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats",
    "ReporterService/GetTraceback",
)
"""One method of each of Ray's services. A port serves one of them, and does not know the others."""
PATHS = ("/", "/metrics", "/get_or_create_runtime_env", "/api/version", "/logs", "/api/jobs/")
"""Pages of Ray's web servers, and of others."""
COUNTERS = "counters for Prometheus"
UNKNOWN = ("UNIMPLEMENTED", "UNAVAILABLE")
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def processes(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of a run."""
    for process in psutil.process_iter():
        try:
            if mark in (f"{name}={value}" for name, value in process.environ().items()):
                yield process
        except (psutil.Error, OSError):
            continue


def answers(where: str, metadata: Sequence[tuple[str, str]]) -> set[str]:
    """Return how an address answers calls of Ray's methods, but for those that it does not know."""
    found = set()
    with grpc.insecure_channel(where) as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=5, metadata=metadata)
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found - set(UNKNOWN)


def test_nothing_of_a_run_can_be_called_without_its_token(tmp_path: Path, tiny_dir: Path) -> None:
    runs.write_shard(tmp_path / "train-000000.tar", range(40))
    runs.write_shard(tmp_path / "eval-000000.tar", range(1000, 1012))
    command = runs.arguments(tmp_path, tiny_dir, "doors", "train.steps=100", "weights.carrier=nccl")
    before = runs.shared_memory()
    with tempfile.TemporaryDirectory(prefix="yt-") as temporary:
        with runs.started(command, temporary=Path(temporary)) as (process, mark):
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("step    1"):
                    break
            ours = list(processes(mark))
            (node,) = (line.split()[3].rstrip(",") for line in said if line.startswith("data plane at "))
            _check_node(node, ours)
            _check_ports(ours)
            _check_files(Path(temporary), ours)
            process.terminate()
            done = runs.finish(process, mark, before, Path(temporary))
    assert done.status == 75 and done.left_behind == [], done.output


def _check_node(uri: str, ours: list[psutil.Process]) -> None:
    with pytest.raises(UnauthenticatedError), Client(uri, credentials=Credentials()) as client:
        client.stat()
    with pytest.raises(UnauthenticatedError), Client(uri, credentials=Credentials(token="x" * 64)) as client:
        client.stat()
    (token_file,) = {Path(found) for one in ours if (found := one.environ().get("DATAPLANE_TOKEN_FILE"))}
    with Client(uri, credentials=Credentials(token_file=token_file)) as client:
        assert client.stat()["num_media"] > 0


def _check_ports(ours: list[psutil.Process]) -> None:
    (token_file,) = {Path(found) for one in ours if (found := one.environ().get("RAY_AUTH_TOKEN_PATH"))}
    shown = [("authorization", f"Bearer {token_file.read_text().strip()}")]
    num_ports = num_web = 0
    for one in ours:
        for found in one.net_connections("tcp"):
            if found.status != psutil.CONN_LISTEN or found.laddr.ip in LOOPBACK:
                continue
            host = "127.0.0.1" if found.laddr.ip in ("0.0.0.0", "::") else found.laddr.ip
            where, name = f"{host}:{found.laddr.port}", " ".join(one.cmdline())[:100]
            assert answers(where, []) <= {"UNAUTHENTICATED"}, f"{name} answers at {where}"
            assert answers(where, [("authorization", f"Bearer {'0' * 64}")]) <= {"UNAUTHENTICATED"}, name
            num_ports += "OK" in answers(where, shown)
            web = {said for path in PATHS if (said := web_page(where, path))}
            assert web <= {"401"} or web == {COUNTERS}, f"{name} at {where}: {web}"
            num_web += bool(web)
    assert num_ports >= 8, "Ray's own servers, and one of each worker"
    assert num_web >= 2, "those that show counters, and Ray's agents"


def web_page(where: str, path: str) -> str:
    """Return the status with which a web server answers a request without a token, or what it shows; an empty text if
    there is no such page, or no web server."""
    try:
        with urllib.request.urlopen(f"http://{where}{path}", timeout=5) as reply:
            text = reply.read().decode()
            return COUNTERS if text.startswith("# HELP ") else f"{reply.status}: {text[:100]}"
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else str(error.code)
    except (OSError, http.client.HTTPException):
        return ""


def _check_files(temporary: Path, ours: list[psutil.Process]) -> None:
    """Check that other users can enter none of the run's folders, and read no memory of it."""
    folders = [path for path in (*temporary.iterdir(), *Path("/dev/shm").glob("yatt-*")) if path.is_dir()]
    assert folders and all(not path.stat().st_mode & 0o077 for path in folders), folders
    mapped = {Path(area.path) for one in ours for area in one.memory_maps() if area.path.startswith("/dev/shm/")}
    assert mapped
    for path in mapped:
        if path.exists() and not any(parent in folders for parent in path.parents):
            assert not path.stat().st_mode & 0o077, path
