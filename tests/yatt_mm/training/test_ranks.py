"""Tests of the pool of ranks: what it does if a rank fails."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.yatt_mm.training import ranks
from tests.yatt_mm.training.ranks import RankPool


def fail_alone(rank: int) -> None:
    """Raise on rank 1, while rank 0 waits for it in a collective."""
    if rank == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))


def add_ranks(rank: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return float(total)


def test_the_first_failure_is_told_soon_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    pool = RankPool()
    try:
        assert pool.run(2, add_ranks) == [1.0, 1.0]
        with pytest.raises(AssertionError, match="rank 1 has had enough"):
            pool.run(2, fail_alone)
        assert pool.run(2, add_ranks) == [1.0, 1.0]
    finally:
        pool.close()
