"""What every test here needs: a CUDA device, and a training world of one rank on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from yatt_mm.training.distributed import init_distributed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where there is no device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a world of this process alone, over NCCL."""
    init_distributed(rank=0, world_size=1, store=f"file://{tmp_path_factory.mktemp('world') / 'store'}")
    yield
    dist.destroy_process_group()
