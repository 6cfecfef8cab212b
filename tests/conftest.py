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

LONGEST = ("training/test_curves.py", "models/test_parity.py", "training/test_rank_checkpoint.py")
"""The test files that take minutes. They begin first, so that `make test`, which runs two files at a time, does not end
with one of them."""

# Time limits on single examples measure the machine, not the code; whole tests have theirs. The examples are the same
# in every run, so that a change is judged by what it changed; `make explore` draws new ones, and many more.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("the same", **ANY_MACHINE, derandomize=True)
settings.register_profile("explore", **ANY_MACHINE, max_examples=3000, print_blob=True)
settings.load_profile("the same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of the slowest files first, and keep the order of the others."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))


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
