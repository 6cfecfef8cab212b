"""Tests that a host says what it lacks of what a run needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.yatt_mm import runs
from yatt_mm.hosts import host_needs
from yatt_mm.hosts.host_needs import HostNeeds, versions


@pytest.fixture
def needs(tmp_path: Path) -> HostNeeds:
    runs.write_shard(tmp_path / "train-0.tar", range(2))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "own.py").write_text("own = 1")
    (tmp_path / "run" / "hosts").mkdir(parents=True)
    seen = tmp_path / "run" / "hosts" / "seen"
    seen.write_text("a text")
    return HostNeeds(
        versions=versions(),
        shared={"run.dir": seen},
        shared_text="a text",
        folders={"model.path": str(tmp_path)},
        sets={"train": [str(tmp_path / "train-*.tar")]},
        rewards=["yatt_mm.rewards.functions:exact_match", f"{tmp_path}/own.py:own"],
    ).with_marks()


def test_a_host_with_everything_lacks_nothing(needs: HostNeeds) -> None:
    assert needs.missing() == []


def test_what_is_not_there_is_named_with_what_to_do(needs: HostNeeds, tmp_path: Path) -> None:
    lacking = replace(
        needs,
        versions={**needs.versions, "pyarrow": "1.0"},
        shared={**needs.shared, "checkpoint.dir": tmp_path / "run" / "hosts" / "other"},
        folders={"reward.judges.tidy.model": "/no/such"},
        rewards=[],
        sets={"eval": [str(tmp_path / "eval-*.tar")]},
    )
    pyarrow, shared, model, data = lacking.missing()
    assert pyarrow == f"it has pyarrow {needs.versions['pyarrow']}, and the launcher's host 1.0: install the same"
    assert f"it does not see the folder of checkpoint.dir, {tmp_path / 'run'} (other: No such file" in shared
    assert model.startswith("reward.judges.tidy.model /no/such has no config.json there")
    assert "eval" in data and "no file matches" in data


@pytest.mark.parametrize(
    ("file", "change", "wanted"),
    [
        (
            "model.safetensors",
            bytes((1 << 20) - 1) + b"1",
            "model.safetensors is not the same as on the launcher's host",
        ),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("train-1.tar", b"", "train-1.tar is not on the launcher's host"),
        ("own.py", b"own = 2", "own.py is not the same as on the launcher's host"),
        ("own.py", None, "own.py is missing"),
    ],
)
def test_copies_that_differ_are_named(
    needs: HostNeeds, tmp_path: Path, file: str, change: bytes | None, wanted: str
) -> None:
    if change is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(change)
    (found,) = needs.missing()
    assert wanted in found and found.endswith("; copy the files of the launcher's host")


def test_a_folder_of_the_same_name_that_is_not_shared_is_seen(needs: HostNeeds) -> None:
    (found,) = replace(needs, shared_text="another text").missing()
    assert "put run.dir on a filesystem that all hosts share" in found


def test_two_checkouts_of_one_version_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions()["yatt-mm"]
    for package in ("yatt_mm/hosts", "dataplane", "models"):
        (tmp_path / package).mkdir(parents=True)
    monkeypatch.setattr(host_needs, "__file__", str(tmp_path / "yatt_mm" / "hosts" / "host_needs.py"))
    empty = versions()["yatt-mm"]
    (tmp_path / "models" / "new.py").write_text("x = 1")
    assert len({before, empty, versions()["yatt-mm"]}) == 3
