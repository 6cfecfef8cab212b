"""Tests that no process of a run has the key of a judge's server in its environment, and that a run's own Ray is on
loopback alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.yatt_mm.runtime.test_run_dir import config_of
from yatt_mm.common.errors import ConfigError
from yatt_mm.runtime.cluster import ray_session
from yatt_mm.runtime.judge_keys import key_file, keys_in_files

KEY = "sk-" + "for-no-environment"
VARIABLE = "YATT_TEST_JUDGE_KEY"
JUDGE = ("reward.judges.away.model=judge", "reward.judges.away.url=http://127.0.0.1:9/v1")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="yt-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Asked:
    """An actor that tells what it inherited."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.mark.alone
def test_ray_and_its_actors_do_not_inherit_the_keys_of_judges_and_listen_on_loopback_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    judges = config_of(folder, *JUDGE, f"reward.judges.away.api_key_env={VARIABLE}").reward.judges
    others = set(psutil.Process().children(recursive=True))
    with (
        keys_in_files(judges, folder),
        ray_session(None, num_cpus=1, scratch=folder, env={"YATT_TEST_MARK": "is inherited"}),
    ):
        actor = ray.remote(Asked).remote()
        inherited = ray.get(actor.environment.remote(), timeout=60)
        assert inherited["YATT_TEST_MARK"] == "is inherited" and VARIABLE not in inherited
        started = set(psutil.Process().children(recursive=True)) - others
        lines = [f"{one.name()} {' '.join(one.cmdline())}" for one in started]
        assert all(any(name in line for line in lines) for name in ("Asked", "gcs_server", "raylet"))
        assert not any(name in line for line in lines for name in ("dashboard.py", "monitor.py")), "no run needs them"
        for one in started:
            environment = Path(f"/proc/{one.pid}/environ").read_text()
            assert KEY not in environment and VARIABLE not in environment, one.cmdline()
        listening = {
            (found.laddr.ip, one)
            for one in (psutil.Process(), *started)
            for found in one.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }
        assert listening and {address for address, _ in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}
        (agent,) = (one for one, line in zip(started, lines) if "ashboard" in line and one.name() != "raylet")
        assert agent not in {one for _, one in listening}, "any user could read its counters"
    assert os.environ[VARIABLE] == KEY


def test_a_key_is_in_a_file_of_its_own_as_long_as_it_is_in_no_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f" {KEY}\n")
    judges = config_of(
        folder,
        *JUDGE,
        f"reward.judges.away.api_key_env={VARIABLE}",
        "reward.judges.second.model=judge",
        "reward.judges.second.url=http://127.0.0.1:9/v1",
        f"reward.judges.second.api_key_env={VARIABLE}",
        "reward.judges.open.model=judge",
        "reward.judges.open.url=http://127.0.0.1:9/v1",
    ).reward.judges
    assert key_file(folder, "open", judges["open"]) is None
    with pytest.raises(KeyError), keys_in_files(judges, folder):
        for name in ("away", "second"):
            file = key_file(folder, name, judges[name])
            assert file is not None and file.read_text().strip() == KEY and not file.stat().st_mode & 0o077
        assert VARIABLE not in os.environ
        raise KeyError("a run that fails")
    assert os.environ[VARIABLE] == f" {KEY}\n"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"{VARIABLE}, which is not set"), keys_in_files(judges, folder / "other"):
        pass
