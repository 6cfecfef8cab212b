"""Fixtures for the tests of models: model folders with their references, a process group of one rank, and the table at
the end of the parity suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models import parity
from tests.yatt_mm.training.tiny import build_folder


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed the random numbers, so that a test does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a family's model (with a head of its own, or a tied one) and its reference by
    transformers; each is made once."""

    @cache
    def make(family: str, *, is_head_tied: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(family)
        return parity.write_reference(build_folder(folder, family, is_head_tied=is_head_tied))

    return make


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the results of the parity suite."""
    if parity.OBSERVED:
        terminalreporter.section("largest differences from transformers, fp32")
        terminalreporter.write_line(parity.table())
