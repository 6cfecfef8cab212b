"""The node that is fuzzed, and a home from which it fetches, as child processes; and the resources that it uses."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dataplane.client.node_process import NodeProcess
from tests.dataplane.shards import encode, noise, write_shard

HOME_ID = "home"
MEMORY_BYTES = 64 << 20
START_S = 120.0
"""The time in seconds within which the node must be ready."""
SETTLE_S = 20.0
"""The time in seconds that an idle node gets until its threads and memory are stable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources that the node's processes use."""

    resident_bytes: int
    """The private memory in bytes of the node and its decode workers, without shared segments."""
    num_threads: int
    num_fds: int


class FuzzedNode:
    """A node as a child process whose log is kept, and a home of objects that it fetches. Neither is restarted when it
    dies."""

    def __init__(self, folder: Path) -> None:
        write_shard(folder / "good-000.tar", {f"{at:03d}": encode(noise(at)) for at in range(8)})
        self._log = folder / "node.log"
        self._disk = folder / "disk"
        serve = [sys.executable, "-X", "faulthandler", "-m", "dataplane", "serve", "--embedded", "--port", "0"]
        home = [*serve, "--memory", "16MiB", "--node-id", HOME_ID, "--host-id", "elsewhere"]
        self.home = NodeProcess(home, os.environ, folder / "home.log")
        self._started = [self.home]
        try:
            self.home.wait_until_ready(START_S)
            command = [*serve, "--memory", str(MEMORY_BYTES), "--workers", "1", "--root", f"good={folder}/good-*.tar"]
            command += ["--spill", str(self._disk), "--spill-size", "16MiB", "--peer", f"{HOME_ID}={self.home.uri}"]
            self.process = NodeProcess(command, os.environ, self._log)
            self._started.append(self.process)
            self.process.wait_until_ready(START_S)
        except BaseException:
            self.stop()
            raise
        self.uri = self.process.uri

    def log(self) -> str:
        """The text that the node wrote to its standard error."""
        return self._log.read_text("utf-8", "replace")

    def usage(self) -> Usage:
        """Return the present usage of the node and its children; zeros if the node is dead."""
        pids = [self.process.pid, *_children(self.process.pid)]
        resident = threads = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                resident += int(lines.get("RssAnon", "0").split()[0]) << 10
                threads += int(lines["Threads"]) if pid == self.process.pid else 0
        with contextlib.suppress(OSError):
            return Usage(
                resident_bytes=resident,
                num_threads=threads,
                num_fds=len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())),
            )
        return Usage(resident_bytes=0, num_threads=0, num_fds=0)

    def settled_usage(self) -> Usage:
        """Wait until the node's usage stays the same, and return it. The node ends threads and frees their memory some
        time after their calls."""
        usage, until = self.usage(), time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            time.sleep(1)
            last, usage = usage, self.usage()
            if usage.num_threads == last.num_threads and abs(usage.resident_bytes - last.resident_bytes) < 1 << 20:
                break
        return usage

    def stop(self) -> int:
        """End the node and its home. Return the exit code of one that had ended by itself before, else 0."""
        ended = [process.poll() for process in self._started]
        for process in self._started:
            process.end(10)
            process.remove()
        return next((code for code in ended if code), 0)

    def files(self) -> list[str]:
        """Return the files in the node's folder of spilled and durable objects."""
        return [path.name for path in self._disk.glob("**/*.arrow")]


def _children(pid: int) -> list[int]:
    """Return the processes that a process started, and their descendants."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split()]
    return found + [deeper for child in found for deeper in _children(child)]
