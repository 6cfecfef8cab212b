"""Fixtures that several test packages share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import models  # noqa: F401  installs the import hooks that CPU builds of torch need

if TYPE_CHECKING:
    from examples.digits.prepare import Prepared
    from tests.yatt_mm.training.ranks import RankPool

SHARED = ("shared_engine", "ranks")
"""The fixtures that take longest to start: an engine, and the processes of the training ranks. `make test` runs several
groups of files at a time, and those that use these fixtures are the first two."""

# Time limits on single examples measure the machine, not the code; whole tests have theirs. The examples are the same
# in every run, so that a change is judged by what it changed; `make explore` draws new ones, and many more.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("the same", **ANY_MACHINE, derandomize=True)
settings.register_profile("explore", **ANY_MACHINE, max_examples=3000, print_blob=True)
settings.load_profile("the same")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that share an expensive fixture into one group for pytest-xdist; every other file is a group of its
    own. The groups of `SHARED` come first, and then the files that start engines of their own."""
    used: dict[Path, set[str]] = {}
    for item in items:
        used.setdefault(item.path, set()).update(getattr(item, "fixturenames", ()))
    rank = {path: next((at for at, name in enumerate(SHARED) if name in names), 2) for path, names in used.items()}
    items.sort(key=lambda item: (rank[item.path], "rollout" not in item.path.parts))
    for item in items:
        group = SHARED[rank[item.path]] if rank[item.path] < 2 else str(item.path.relative_to(item.config.rootpath))
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits example's Qwen2.5-VL with random weights, as a Hugging Face folder."""
    pytest.importorskip("torch")
    from examples.digits.model import build_model_folder

    directory = tmp_path_factory.mktemp("models") / "tiny"
    build_model_folder(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def prepared_digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared]:
    """The digits example as `make train` prepares it, and how it was made.

    The warm-up takes half a minute, so all tests that need it are marked `alone`: they run in one process.
    """
    from examples.digits.prepare import prepare

    directory = tmp_path_factory.mktemp("prepared")
    return directory, prepare(directory, seed=0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of processes that run jobs as training ranks."""
    from tests.yatt_mm.training.ranks import RankPool  # needs torch, which many tests do not

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> None:
    """Make Ctrl-C work in the commands that tests start, also if the suite runs in the background, where a shell
    ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
