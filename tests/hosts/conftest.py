"""Fixtures of the tests over several hosts: the digits example in a folder that all hosts see."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.common.cluster import Cluster, cluster_of
from benchmarks.common.hosts import why_not_allowed
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import kills
from tests.yatt_mm.whole_runs.conftest import Digits, digits  # noqa: F401  a fixture

if TYPE_CHECKING:
    from examples.preparing import WarmedUp


@pytest.fixture(scope="session", autouse=True)
def allowed() -> None:
    """Skip the tests, with the reason, where no hosts can be made."""
    if why := why_not_allowed():
        pytest.skip(why)


@pytest.fixture(scope="session")
def shared_digits(digits: Digits, prepared_digits: tuple[Path, WarmedUp]) -> Iterator[Digits]:  # noqa: F811
    """The digits in a folder that is no host's own, as on a shared filesystem."""
    with tempfile.TemporaryDirectory(prefix="yt-hosts-", dir="/var/tmp") as name:
        folder = Path(name)
        shutil.copytree(digits.model, folder / "model")
        for shard in digits.folder.glob("*.tar"):
            shutil.copy(shard, folder)
        yield Digits(folder=folder, model=folder / "model", accuracy=digits.accuracy, num_eval=digits.num_eval)


@pytest.fixture(scope="session")
def on_one_host(shared_digits: Digits) -> runs.Finished:
    """A short run on one host, with which those over several are compared."""
    return runs.run(shared_digits.arguments("one", *SHORT))


@pytest.fixture(scope="module")
def cluster(shared_digits: Digits) -> Iterator[Cluster]:
    """Two hosts with Ray."""
    yield from _cluster(2, shared_digits.folder / "two")


@pytest.fixture(scope="module")
def cluster_of_three(shared_digits: Digits) -> Iterator[Cluster]:
    """Three hosts with Ray."""
    yield from _cluster(3, shared_digits.folder / "three")


@pytest.fixture(scope="module")
def phases(shared_digits: Digits) -> Path:
    """A file in which the controllers of the runs on `cluster_with_phases` write to which phase they come."""
    path = shared_digits.folder / "phases"
    path.touch()
    return path


@pytest.fixture(scope="module")
def cluster_with_phases(shared_digits: Digits, phases: Path) -> Iterator[Cluster]:
    """Two hosts with Ray, whose runs tell when they come to a phase."""
    environ = {"PYTHONPATH": str(kills.PHASES), "YATT_TEST_PHASES": str(phases)}
    yield from _cluster(2, shared_digits.folder / "with_phases", environ)


def cut_link(cluster: Cluster, run_dir: Path, seconds: float) -> None:
    """Take the link of the second host down for a time in which several steps end otherwise, and at most the present
    one now."""

    def num_records() -> int:
        return len((run_dir / "metrics.jsonl").read_text().splitlines())

    cluster.hosts[1].cut()
    try:
        before = num_records()
        time.sleep(seconds)
        assert num_records() <= before + 1, "the run went on as if there were no other host"
    finally:
        cluster.hosts[1].mend()


def _cluster(num: int, folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    folder.mkdir()
    with cluster_of(num, folder, environ=environ) as made:
        for number in range(num):
            made.start_ray(number)
        yield made
    shutil.rmtree(folder)


SHORT = ("train.steps=3", "eval.every=0", "checkpoint.every=2")
"""Overrides of a run of three steps."""
