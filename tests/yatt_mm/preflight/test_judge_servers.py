"""Tests that a judge's server that is not there is told at the start."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.yatt_mm import runs
from yatt_mm.config.run_config import load_config
from yatt_mm.preflight.judge_servers import unreachable_servers


def warnings(port: int) -> list[str]:
    judge = (f"reward.judges.away.url=http://127.0.0.1:{port}/v1", "reward.judges.away.model=m")
    path, *overrides = runs.arguments(Path("unused"), Path("unused"), "judged", "train.steps=1", *judge)
    own = "reward.judges.own.model=some/folder"
    return list(unreachable_servers(load_config(runs.ROOT / path, [*overrides, own])))


def test_a_server_that_is_not_there_is_told_and_one_that_listens_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert warnings(port) == []
    (warning,) = warnings(port)
    assert f"reward.judges.away.url http://127.0.0.1:{port}/v1 takes no connection (Connection refused)" in warning
    assert "every verdict fails and scores 0 (score_on_failure)" in warning
