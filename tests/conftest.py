"""Fixtures that several test packages share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import models  # noqa: F401  installs the import hooks that CPU builds of torch need
from tests.dataplane.forked_nodes import forked_nodes
from tests.made_once import made_once
from tests.tables import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401  are hooks
from yatt_mm.common.large_imports import large_imports

# numpy's threads keep a processor busy for a moment, in every process that a test starts, and have no work there; those
# of torch, in tests beside each other, wait for one another on processors that are busy
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from examples.preparing import WarmedUp
    from tests.yatt_mm.training.ranks import RankPool

TOGETHER = {
    "tests/yatt_mm/whole_runs/test_signals.py": "signals",
    "tests/yatt_mm/rollout": "engines",
    "tests/models": "models",
    "tests/dataplane/media": "models",
    "tests/yatt_mm/generation": "models",
    "tests/yatt_mm/preflight": "models",
    "tests/yatt_mm/survey": "models",
    "tests/yatt_mm/training/lora": "models",
    "tests/yatt_mm/weights": "models",
    "tests/yatt_mm/training": "ranks",
    "tests/examples/test_digits.py": "digits",
    "tests/yatt_mm/whole_runs/test_learning.py": "digits",
    "tests/yatt_mm/runtime/test_losses.py": "losses",
    "tests/yatt_mm/whole_runs/test_faults.py": "deaths",
    "tests/dataplane/server/test_restart.py": "restarts",
    "tests/dataplane/cluster/test_fetch.py": "fetches",
}
"""The folders and files that share what takes longest to start: an engine, the processes of the training ranks,
transformers, or whole runs; and those that take longest themselves, or fill the time until the digits are prepared
(`losses`). When pytest-xdist runs several files at a time, one worker takes all files of a group, and these groups come
first. The first beginning of a path that fits counts."""

APART = (
    "tests/yatt_mm/whole_runs/test_every_death.py",
    "tests/yatt_mm/whole_runs/test_other_deaths.py",
    "tests/yatt_mm/whole_runs/test_signals.py",
)
"""The files whose tests take minutes each: one worker takes one test."""

ELSEWHERE = ("parity", "faults", "endings", "hosts")
"""The marks of tests for which there are other commands than `make test`."""

OF_TORCH = frozenset(("tiny_dir", "ranks", "prepared_digits"))
"""The fixtures of this file that load torch, so that the tests that use them are not in the quick half."""

# Time limits on single examples measure the machine, not the code; whole tests have theirs. The examples are the same
# in every run, so that a change is judged by what it changed; `make explore` draws new ones, and many more.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("the same", **ANY_MACHINE, derandomize=True)
settings.register_profile("explore", **ANY_MACHINE, max_examples=3000, print_blob=True)
settings.load_profile("the same")


@pytest.fixture(autouse=True)
def is_never_real_time() -> Iterator[None]:
    """Fail if a test leaves this process with a real-time priority, which all that later tests start would have too."""
    yield
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        pytest.fail("this process has a real-time priority now; start what sets one in a process of its own")


def group_of(path: str) -> str:
    """Return the group of a test file, which is the file itself unless it is among those of `TOGETHER`."""
    return next((group for one, group in TOGETHER.items() if path == one or path.startswith(f"{one}/")), path)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of other commands and those whose fixtures load torch, and put those of the groups of `TOGETHER`
    first, group by group."""
    for item in items:
        if not OF_TORCH.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("torch")
        if any(item.get_closest_marker(mark) for mark in ELSEWHERE):
            item.add_marker("elsewhere")
    first = list(TOGETHER.values())
    group = [group_of(item.nodeid.partition("::")[0]) for item in items]
    place = {id(item): first.index(one) if one in first else len(first) for item, one in zip(items, group)}
    items.sort(key=lambda item: place[id(item)])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests, and with them most of what they test, as a run does."""
    with large_imports():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives a group of files to one worker, and no more than the next test before it has room.
    (The mark `xdist_group` of pytest-xdist 3.8 has no effect with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path in APART else group_of(path)

        def _reschedule(self, node: Any) -> None:
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits example's Qwen2.5-VL with random weights, as a Hugging Face folder."""
    pytest.importorskip("torch")

    def make(folder: Path) -> Path:
        from examples.digits.model import build_model_folder  # loads torch and transformers, which takes seconds

        build_model_folder(folder, seed=0)
        return folder

    return made_once(tmp_path_factory, "tiny", make)


@pytest.fixture(scope="session")
def prepared_digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WarmedUp]:
    """The digits example as `make train` prepares it, and how it was made.

    The warm-up takes half a minute, so it is made once for all workers.
    """
    from examples.digits.prepare import prepare

    return made_once(tmp_path_factory, "prepared", lambda folder: (folder, prepare(folder, seed=0)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of processes that run jobs as training ranks."""
    from tests.yatt_mm.training.ranks import RankPool  # needs torch, which many tests do not

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def nodes_are_forked() -> Iterator[None]:
    """Fork the embedded nodes that tests start in this process."""
    with forked_nodes():
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> None:
    """Make Ctrl-C work in the commands that tests start, also if the suite runs in the background, where a shell
    ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
