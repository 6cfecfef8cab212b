"""A Ray cluster over hosts that are namespaces (`benchmarks.common.hosts`), and whole runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.hosts import Host, Hosts
from yatt_mm.common.tokens import write_token

ROOT = Path(__file__).parents[2]
PORT = 6379
START_S = 60.0
DEADLINE_S = 500.0
END_S = 30.0
RAY = str(Path(sys.executable).with_name("ray"))
RAYS_FILES = "/tmp/ray"
"""Where Ray keeps its files on every host; they are the cluster's, not the run's."""
RAYS_PROCESSES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""What the titles of its own processes contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended."""

    status: int
    output: str
    left_behind: list[str]
    """The files and processes that a host had after the run, and not before it."""


class Cluster:
    """Hosts with a raylet on each. The first one is the head, and the place where runs are started."""

    def __init__(self, hosts: Hosts, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        """`folder`: for files that all hosts see. `environ`: more variables for Ray and for runs."""
        self.hosts = hosts
        self._folder = folder
        self._stack = ExitStack()
        self._run: subprocess.Popen[str] | None = None
        """The run that was started last."""
        inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        self._environ = {  # without what torch has set in the process of the tests for its children
            **inherited,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(write_token(folder / "cluster_token")),
            "RAY_USAGE_STATS_ENABLED": "0",
            **(environ or {}),
        }

    @property
    def address(self) -> str:
        """What `ray.address` names."""
        return f"{self.hosts[0].address}:{PORT}"

    def start_ray(self, number: int, environ: Mapping[str, str] | None = None) -> None:
        """Start Ray on a host, with one CPU slot, and wait until it takes part. `environ`: more variables for it."""
        host = self.hosts[number]
        words = [f"--address={self.address}"] if number else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        words += [f"--node-ip-address={host.address}", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
        log = self._folder / f"ray-{number}.log"
        with log.open("wb") as output:
            process = host.start(
                [RAY, "start", *words], environ={**self._environ, **(environ or {})}, stdout=output, stderr=output
            )
        self._stack.callback(_end, process)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        """Wait until the run that is under way has finished this step."""
        deadline, file, is_over = time.monotonic() + DEADLINE_S, run_dir / "metrics.jsonl", False
        while not is_over:
            is_over = time.monotonic() > deadline or (self._run is not None and self._run.poll() is not None)
            if file.exists() and any(json.loads(line)["step"] == step for line in file.read_text().splitlines()):
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} did not end in {DEADLINE_S:g} s, or the run has ended before")

    def sent_bytes(self) -> int:
        """Return what all hosts have sent to each other so far, with all headers."""
        return sum(self.hosts[number].counters().sent for number in range(len(self.hosts)))

    def stop(self) -> None:
        """End Ray on all hosts."""
        self._stack.close()

    def run(
        self,
        arguments: Sequence[str],
        *,
        num_hosts: int = 2,
        meanwhile: Callable[[], None] = lambda: None,
        num_seen: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Finished:
        """Run `python -m yatt_mm.train` on the first host, over this number of hosts, to its end. `meanwhile` is called
        in a thread at the start; its errors are raised here. `num_seen`: the hosts that are looked at afterwards; all
        by default."""
        hosts = [self.hosts[number] for number in range(len(self.hosts))][:num_seen]
        before = [_seen(host) for host in hosts]
        over = [f"ray.address={self.address}", f"placement.num_devices={num_hosts}", "placement.devices_per_host=1"]
        self._run = process = self.hosts[0].start(
            [sys.executable, "-m", "yatt_mm.train", *arguments, *over],
            environ=self._environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(meanwhile)
            try:
                output, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                raise AssertionError(f"the run did not end in {deadline_s:g} s:\n{output}") from None
            try:
                doing.result()
            except Exception as error:
                raise AssertionError(f"what had to happen during the run failed: {error!r}\n{output}") from error
        deadline = time.monotonic() + END_S
        while (left := _left(hosts, before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return Finished(status=process.returncode, output=output, left_behind=left)


@contextmanager
def cluster_of(
    num: int, folder: Path, *, environ: Mapping[str, str] | None = None, delay_s: float = 0.0
) -> Iterator[Cluster]:
    """Make hosts, and what runs Ray on them, for a `with` block. `environ`: see `Cluster`; `delay_s`: see `Hosts`."""
    with Hosts(num, delay_s=delay_s) as hosts:
        cluster = Cluster(hosts, folder, environ)
        try:
            yield cluster
        finally:
            cluster.stop()


def _seen(host: Host) -> set[str]:
    """Return what is on a host: its own files, and its processes. Ray's own are left out: idle workers come and go, and
    agents are others when it is started again."""
    files = {path for path in host.files() if not path.startswith(RAYS_FILES)}
    processes = {f"process {line}" for line in host.processes() if not any(name in line for name in RAYS_PROCESSES)}
    return files | processes


def _left(hosts: Sequence[Host], before: Sequence[set[str]]) -> list[str]:
    return [f"{host.name}: {what}" for host, had in zip(hosts, before) for what in sorted(_seen(host) - had)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `ray start --block`, which ends the processes that it has started."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
