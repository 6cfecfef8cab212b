"""Tests of the copies of checkpoints at a URL: whole, verified, and never instead of others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.manifest import check_files
from yatt_mm.runtime import checkpoint_copies
from yatt_mm.runtime.checkpoint_copies import CheckpointCopies


class Careless(MemoryFileSystem):
    """A filesystem that once loses the end of a file, without a word."""

    protocol = "careless"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    num_lost = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("careless:/"))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        super().put_file(lpath, rpath, **options)
        if not type(self).num_lost:
            type(self).num_lost += 1
            self.pipe_file(rpath, self.cat_file(rpath)[:-1])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_copies, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(checkpoint_copies, "POLL_S", 0.01)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(root=tmp_path / "run" / "checkpoints", keep=2)


def save(checkpoints: Checkpoints, step: int, text: str = "weights") -> Path:
    folder = checkpoints.begin(step)
    (folder / "parts").mkdir()
    (folder / "parts" / "rank-0.safetensors").write_text(text)
    return checkpoints.commit(step, {"step": step})


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_checkpoints_are_copied_while_the_run_goes_on_and_those_at_its_end_before_it_returns(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    there = tmp_path / "far" / "away"
    with CheckpointCopies(checkpoints, f"file://{there}", pytest.fail):
        for step in range(1, 5):
            save(checkpoints, step)
            wait_for((there / f"step_{step:06d}" / "manifest.json").exists)
        save(checkpoints, 5)
    assert checkpoints.steps() == [4, 5]
    assert len(list(there.iterdir())) == 5, "nothing is removed there"
    for step in range(1, 6):
        check_files(there / f"step_{step:06d}")


def test_a_signal_at_the_end_of_a_run_ends_the_wait_for_copies(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, may_end, said = threading.Event(), threading.Event(), list[str]()

    def copy(*_: object) -> None:
        is_copying.set()
        may_end.wait(60)

    monkeypatch.setattr(CheckpointCopies, "_copy_file", copy)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with CheckpointCopies(checkpoints, f"file://{tmp_path}/there", said.append):
            save(checkpoints, 1)
            assert is_copying.wait(60)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    finally:
        may_end.set()
    assert [line.partition("; see")[0] for line in said] == [
        f"checkpoint.copy_to: file://{tmp_path}/there has no copy of step 1"
    ]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_copy_that_lost_bytes_is_noticed_and_made_again(checkpoints: Checkpoints) -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    Careless.num_lost, told = 0, list[str]()
    save(checkpoints, 7)
    with CheckpointCopies(checkpoints, "careless://bucket/run", told.append):
        pass
    (line,) = told
    assert "careless://bucket/run did not take step 7 (/bucket/run/step_000007/parts" in line
    assert "is not what was written" in line and line.endswith("; trying again")
    written = {path: Careless().cat_file(path) for path in Careless().find("/bucket")}
    folder = checkpoints.folder(7)
    assert written == {
        f"/bucket/run/step_000007/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_another_run_copied_there_stays_and_what_is_there_is_not_copied_again(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    other = Checkpoints(root=tmp_path / "other", keep=2)
    for of, text in ((other, "other weights"), (checkpoints, "weights"), (checkpoints, "")):
        if text:
            save(of, 1, text)
        before = {path: path.stat().st_mtime_ns for path in there.rglob("*") if path.is_file()}
        with CheckpointCopies(of, str(there), pytest.fail):
            pass
        now = {path: path.stat().st_mtime_ns for path in there.rglob("*") if path.is_file()}
        assert before.items() <= now.items() and (len(now) > len(before)) == bool(text)
    first, second = sorted(there.iterdir())
    assert first.name == "step_000001" and second.name.startswith("step_000001.")
    assert (first / "parts" / "rank-0.safetensors").read_text() == "other weights"
    assert (second / "parts" / "rank-0.safetensors").read_text() == "weights"


def test_a_run_that_is_stopped_does_not_wait_for_copies_and_a_place_that_takes_nothing_is_named(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("no folder")
    save(checkpoints, 1)
    told = list[str]()
    with pytest.raises(KeyboardInterrupt), CheckpointCopies(checkpoints, str(tmp_path / "a_file"), told.append):
        raise KeyboardInterrupt
    monkeypatch.setattr(checkpoint_copies, "LAST_FILE_S", 0.3)
    told.clear()
    with CheckpointCopies(checkpoints, str(tmp_path / "a_file"), told.append):
        wait_for(lambda: bool(told))
    assert "did not take step 1" in told[0]
    assert told[-1] == (f"checkpoint.copy_to: {tmp_path / 'a_file'} has no copy of step 1; see {checkpoints.root}")
