"""What a Slurm job sees of Slurm, over hosts that are namespaces: `srun`, `scontrol`, and its environment.

A host cannot start a process on another one, so `srun` writes an order into a folder that all hosts see, and a thread
of the tests carries it out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.common.hosts import Hosts
from tests.yatt_mm.runs import ROOT

SRUN = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options):]
node = next(word.split("=")[1] for word in options if word.startswith("--nodelist="))
order = Path("{steps}") / f"{{node}}-{{os.getpid()}}"
signal.signal(signal.SIGTERM, lambda number, frame: order.with_suffix(".term").touch())
order.with_suffix(".new").write_text(json.dumps({{"node": node, "command": command, "environ": dict(os.environ)}}))
order.with_suffix(".new").rename(order.with_suffix(".order"))
while not order.with_suffix(".ended").exists():
    time.sleep(0.1)
sys.exit(int(order.with_suffix(".ended").read_text() or 1))
"""
SCONTROL = """#!/bin/bash
case "$1" in
  show) printf '%s\\n' {nodes} ;;
  requeue) echo "$2" > {folder}/requeued ;;
esac
"""


class Slurm:
    """A job's view of Slurm. Use it as a context manager; at its end all steps end."""

    def __init__(self, hosts: Hosts, folder: Path, *, job: int) -> None:
        self.requeued = folder / "requeued"
        """A file with the number of the job, once it has asked to be started again."""
        self._hosts = {hosts[number].name: hosts[number] for number in range(len(hosts))}
        self._folder = folder
        self._steps = folder / "steps"
        self._job = job
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        commands = folder / "bin"
        for made in (self._steps, commands):
            made.mkdir()
        texts = {
            "srun": SRUN.format(python=sys.executable, steps=self._steps),
            "scontrol": SCONTROL.format(nodes=" ".join(self._hosts), folder=folder),
        }
        for name, text in texts.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        self._environ = {
            **inherited,
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_SUBMIT_DIR": str(folder),
            "DEVICES_PER_HOST": "1",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        for process in self._running.values():
            process.kill()
            process.wait()

    def submit(self, script: Path, *arguments: str) -> Any:
        """Start a batch script on the first host, as Slurm does, and return the handle of its process."""
        return next(iter(self._hosts.values())).start(
            ["bash", str(script), *arguments],
            environ=self._environ,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _serve(self) -> None:
        while not self._is_over.wait(0.1):
            for path in self._steps.glob("*.order"):
                order = json.loads(path.read_text())
                path.unlink()
                host = self._hosts[order["node"]]
                self._running[path] = host.start(order["command"], environ=order["environ"], cwd=self._folder)
            for path, process in list(self._running.items()):
                if path.with_suffix(".term").exists():
                    path.with_suffix(".term").unlink()
                    for child in psutil.Process(process.pid).children():  # `nsenter` hands no signal on
                        child.terminate()
                if process.poll() is not None:
                    del self._running[path]
                    path.with_suffix(".ended").write_text(str(process.returncode))
