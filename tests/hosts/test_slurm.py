"""The batch script for Slurm, over two hosts: stopped before its time is over, started again, and at its end."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.common.hosts import Hosts
from tests.dataplane.shards import wait_until
from tests.hosts.conftest import SHORT
from tests.hosts.slurm import Slurm
from tests.yatt_mm import runs
from tests.yatt_mm.runs import ROOT
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = pytest.mark.hosts

DEADLINE_S = 400.0
SCRIPT = ROOT / "examples" / "slurm" / "train.sh"


def wait_for_file(path: Path, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline and job.poll() is None, f"no {path}"
        time.sleep(0.1)


def test_a_job_that_is_stopped_and_requeued_has_the_numbers_of_one_host(
    shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    assert on_one_host.status == 0, on_one_host.output
    folder = shared_digits.folder / "slurm"
    folder.mkdir()
    config, *rest = shared_digits.arguments("job", *SHORT)
    arguments = [str(ROOT / config), *rest]
    with Hosts(2) as hosts, Slurm(hosts, folder, job=4711) as slurm:
        before = [(hosts[number].files(), set(hosts[number].processes())) for number in (0, 1)]
        job = slurm.submit(SCRIPT, *arguments)
        wait_for_file(shared_digits.run("job") / "metrics.jsonl", job)
        batch = next(line for line in hosts[0].processes() if str(SCRIPT) in line)
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", batch.split()[0]], check=True)
        output, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 75 and slurm.requeued.read_text().strip() == "4711", output
        assert not list(folder.glob(".ray_token*")), "the token goes with the job"
        (saved,) = (int(line.split()[3]) for line in output.splitlines() if line.startswith("saved after step"))
        again = slurm.submit(SCRIPT, *arguments)
        output, _ = again.communicate(timeout=DEADLINE_S)
        assert again.returncode == 0, output
        steps = [int(line.split()[1]) for line in output.splitlines() if re.match(r"step +\d", line)]
        assert steps == list(range(saved + 1, 4)), "it goes on from what the first one has saved"
        assert not list(folder.glob(".ray_token*"))
        for number, (files, processes) in enumerate(before):
            left = set(hosts[number].files()) - set(files)
            assert not [path for path in left if not path.startswith("/tmp/ray")], left
            wait_until(lambda host=hosts[number], before=processes: set(host.processes()) <= before, 30)
    assert runs.curve(shared_digits.folder, "job") == runs.curve(shared_digits.folder, "one")
