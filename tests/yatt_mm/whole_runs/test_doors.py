"""Tests that a run can be entered neither from the network, nor by other users, nor without its tokens."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.core.errors import UnauthenticatedError
from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import serving, verdict
from tests.yatt_mm.whole_runs.other_user import Found, Targets, answers, found_by, trying

pytestmark = [pytest.mark.alone, pytest.mark.endings]

OTHER_USER = 65534
"""The user of Linux that owns nothing."""
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
KEY, VARIABLE = "sk-" + "only-for-this-run", "YATT_TEST_JUDGE_KEY"
PLANTED = "planted-token"
"""A file that every user can read, where the run has its folders: what is found must be found there too."""


@dataclass(frozen=True, slots=True)
class Running:
    """A run in its second step or later."""

    folder: Path
    """The folder with the run's results and its temporary files. Every user can enter it."""
    uri: str
    """The address of its node."""
    processes: list[psutil.Process]

    def ports(self) -> set[tuple[str, int]]:
        """Return the addresses at which the run listens."""
        return {
            (found.laddr.ip, found.laddr.port)
            for one in self.processes
            for found in one.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }

    def token(self, variable: str) -> str:
        """Return the token in the file that this variable of the run's processes names."""
        (file,) = {found for one in self.processes if (found := one.environ().get(variable))}
        return Path(file).read_text().strip()

    def paths(self) -> set[Path]:
        """Return the names of all files, folders and sockets of the run, also in shared memory."""
        found = {path for path in self.folder.rglob("*") if path.name[0] != "."} | {*self.folder.rglob(".*")}
        for one in self.processes:
            found |= {Path(area.path) for area in one.memory_maps() if area.path.startswith("/dev/shm/")}
            for fd in Path(f"/proc/{one.pid}/fd").iterdir():
                found |= {path for path in _target(fd) if path.is_relative_to("/dev/shm")}
        shared = {path for path in found if path.is_relative_to("/dev/shm")}
        for folder in {path.parent for path in shared} - {Path("/dev/shm")}:
            found |= {folder, *folder.rglob("*")}
        return {path for path in found if path.exists()} - {self.folder / "tmp"}

    def abstract(self) -> set[str]:
        """Return the names of its Unix sockets that have no file."""
        inodes = {
            str(target).removeprefix("socket:[").rstrip("]")
            for one in self.processes
            for fd in Path(f"/proc/{one.pid}/fd").iterdir()
            for target in _target(fd)
        }
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return {line[7][1:] for line in lines if len(line) > 7 and line[6] in inodes and line[7].startswith("@")}


def _target(fd: Path) -> list[Path]:
    try:
        return [fd.readlink()]
    except OSError:  # it was closed in the meantime
        return []


def processes(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of a run."""
    for process in psutil.process_iter():
        try:
            if mark in process.environ().get("PYTHONPATH", ""):
                yield process
        except (psutil.Error, OSError):
            continue


@pytest.fixture(scope="module")
def running(tiny_dir: Path) -> Iterator[Running]:
    """A run with an engine over two devices, weights by broadcast, and a judge behind a server that needs a key. It is
    told to stop at the end, and must have gone on until then."""

    async def reply(request: web.Request, body: object) -> web.StreamResponse:
        return verdict()

    with (
        tempfile.TemporaryDirectory(prefix="yt-") as name,
        serving(reply) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder, temporary = Path(name), Path(name) / "tmp"
        folder.chmod(0o755)
        temporary.mkdir()
        temporary.chmod(0o1777)
        patch.setenv(VARIABLE, KEY)
        runs.write_shard(folder / "train-000000.tar", range(40))
        runs.write_shard(folder / "eval-000000.tar", range(1000, 1012))
        command = runs.arguments(
            folder,
            tiny_dir,
            "doors",
            "train.steps=1000",
            "weights.carrier=nccl",
            "rollout.tp=2",
            "rollout.num_engines=1",
            "reward.judges.away.model=judge",
            f"reward.judges.away.url={server.url}",
            f"reward.judges.away.api_key_env={VARIABLE}",
        )
        before = runs.shared_memory()
        with runs.started(command, temporary=temporary) as (process, mark):
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("step    2"):
                    break
            assert process.poll() is None, "".join(said)
            (uri,) = (line.split()[3].rstrip(",") for line in said if line.startswith("data plane at "))
            yield Running(folder, uri, list(processes(mark)))
            _wait_for_more_steps(folder, process)
            process.terminate()
            done = runs.finish(process, mark, before, temporary)
        assert done.status == 75 and done.left_behind == [], done.output


def _wait_for_more_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait for two more steps, or for the end of the run: it goes on, whatever was tried."""
    first, deadline = len(runs.metrics(folder, "doors")), time.monotonic() + 300
    while len(runs.metrics(folder, "doors")) < first + 2 and process.poll() is None:
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.2)


def test_it_listens_on_loopback_alone_and_nothing_answers_without_a_token(running: Running) -> None:
    ports = running.ports()
    assert {host for host, _ in ports} <= {*LOOPBACK}, "another machine could reach the others"
    with trying(Targets(ports=[("127.0.0.1", port) for _, port in ports])) as process:
        found = found_by(process)
    assert found == set()
    shown = [("authorization", f"Bearer {running.token('RAY_AUTH_TOKEN_PATH')}")]
    num_open = sum("OK" in answers(f"127.0.0.1:{port}", shown) for _, port in ports - gloo(running))
    assert num_open >= 8, "with its token: Ray's own servers, and one of each worker"


def gloo(running: Running) -> set[tuple[str, int]]:
    """Return the addresses at which the ranks, and the processes that compute for an engine, wait for each other."""
    waiting = [one for one in running.processes if any(name in str(one.cmdline()) for name in ("TrainActor", "Worker"))]
    return Running(running.folder, running.uri, waiting).ports()


def test_the_node_answers_to_its_token_alone(running: Running) -> None:
    with pytest.raises(UnauthenticatedError), Client(running.uri, credentials=Credentials()) as client:
        client.stat()
    with pytest.raises(UnauthenticatedError), Client(running.uri, credentials=Credentials(token="x" * 64)) as client:
        client.stat()
    with Client(running.uri, credentials=Credentials(token=running.token("DATAPLANE_TOKEN_FILE"))) as client:
        assert client.stat()["num_media"] > 0


def test_no_process_but_the_command_itself_has_the_key_of_a_judge(running: Running) -> None:
    (file,) = (running.folder / "tmp").rglob("judge_key_away")
    assert file.read_text().strip() == KEY
    for one in running.processes:
        if "yatt_mm.train" not in one.cmdline():  # the supervisor, and the launcher that it may have to start again
            assert KEY not in str(one.environ()), one.cmdline()


def test_no_file_has_a_token_but_the_one_that_is_for_it(running: Running) -> None:
    tokens = {running.token("RAY_AUTH_TOKEN_PATH"), running.token("DATAPLANE_TOKEN_FILE"), KEY}
    read, holding = set[str](), set[str]()
    for path in running.paths():
        with suppress(OSError):  # a socket; or a file that the run has removed meanwhile
            content = path.read_bytes() if path.is_file() else b""
            read.add(path.name)
            holding |= {path.name for token in tokens if token.encode() in content}
    assert {"metrics.jsonl", "config.yaml", "rank-0.log", "raylet.out"} <= read
    assert holding == {"ray_token", "node_token", "judge_key_away"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a program as another user")
def test_another_user_of_the_machine_can_read_call_and_fill_nothing(running: Running) -> None:
    planted = running.folder / "tmp" / PLANTED
    planted.write_text("planted")
    planted.chmod(0o644)
    with closing(socket.socket(socket.AF_UNIX)) as unix:
        unix.bind(f"{planted}.sock")
        Path(f"{planted}.sock").chmod(0o777)
        unix.listen()
        found, targets = _tried_by_another(running)
        Path(f"{planted}.sock").unlink()
    planted.unlink()
    assert {(did, what) for did, what, _ in found} == {
        ("read", str(planted)),
        ("connected", f"{planted}.sock"),
        ("listed", str(running.folder / "runs")),  # run.dir; the folder of the run in it cannot be entered
        *(("read", str(shard)) for shard in running.folder.glob("*.tar")),
    }
    tried = [Path(path) for path in targets.paths]
    assert sum(path.is_socket() for path in tried) >= 8, "Ray's, and vLLM's between its processes"
    for name in ("ray_token", "node_token", "judge_key_away", "ranks_store", "metrics.jsonl", "psm_", "yatt-weights-"):
        assert any(path.name.startswith(name) for path in tried), name
    assert len(targets.ports) >= 60 and len(targets.pids) >= 15


def _tried_by_another(running: Running) -> tuple[set[Found], Targets]:
    """Try all that the run has, as another user, who also floods its node. The node must serve the run meanwhile."""
    host, _, port = running.uri.rpartition("/")[2].rpartition(":")
    targets = Targets(
        uid=OTHER_USER,
        paths=[str(path) for path in running.paths()],
        pids=[one.pid for one in running.processes],
        secrets=[running.token("RAY_AUTH_TOKEN_PATH"), running.token("DATAPLANE_TOKEN_FILE"), KEY],
        ports=[("127.0.0.1", port) for _, port in running.ports()],
        abstract=list(running.abstract()),
        flood=(host, int(port)),
    )
    credentials = Credentials(token=running.token("DATAPLANE_TOKEN_FILE"))
    with trying(targets) as process, Client(running.uri, credentials=credentials, timeout_s=10) as client:
        before = client.stat()
        assert process.stdout is not None and process.stdout.readline() == '"flooding"\n'
        with Client(running.uri, credentials=credentials, timeout_s=10) as newcomer:
            during = newcomer.stat()
        assert during["num_streams"] <= before["num_streams"] + 1, "no stream without a token is open"
        return found_by(process), targets
