"""Tests that a run removes the folders that a killed run of the same user left, and no others."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from yatt_mm.common import owned_dirs
from yatt_mm.common.owned_dirs import SEMAPHORES, owned_folder, remove_orphans, semaphores_named

ROOT = Path(__file__).parents[3]
OWNER = """
import sys, time
from pathlib import Path
from yatt_mm.common.owned_dirs import owned_folder
with owned_folder(Path(sys.argv[1]), "yatt-") as folder:
    (folder / "policy-1").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(60)
"""


def start_owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def end(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.wait()
    owner.stdout.close()  # type: ignore[union-attr]


def test_what_a_killed_owner_left_is_removed_by_the_next_and_what_is_alive_stays(tmp_path: Path) -> None:
    killed, orphan = start_owner(tmp_path)
    living, kept = start_owner(tmp_path)
    foreign = tmp_path / "yatt-of-another-user"
    foreign.mkdir()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (orphan / "policy-1").exists()
        with owned_folder(tmp_path, "yatt-") as mine:
            assert not orphan.exists()
            assert (kept / "policy-1").exists() and foreign.exists() and mine.exists()
            assert remove_orphans(tmp_path, "yatt-") == []
        assert not mine.exists() and kept.exists()
    finally:
        end(killed)
        end(living)
    assert remove_orphans(tmp_path, "yatt-") == [kept]


def test_a_folder_that_its_owner_is_removing_is_not_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Path]] = []
    remove = owned_dirs.remove

    def look_and_remove(folder: Path) -> None:
        monkeypatch.undo()
        found.append(remove_orphans(tmp_path, "yatt-"))
        remove(folder)

    with owned_folder(tmp_path, "yatt-"):
        monkeypatch.setattr(owned_dirs, "remove", look_and_remove)
    assert found == [[]] and not list(tmp_path.iterdir())


def test_a_folder_that_its_owner_removes_before_it_is_locked_is_not_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    owner = owned_folder(tmp_path, "yatt-")
    owner.__enter__()

    def end_and_lock(fd: int, operation: int) -> None:
        monkeypatch.undo()
        owner.__exit__(None, None, None)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", end_and_lock)
    assert remove_orphans(tmp_path, "yatt-") == [] and not list(tmp_path.iterdir())


def test_a_folder_whose_lock_file_cannot_be_made_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: Path, mode: str) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "open", no_room)
    with pytest.raises(OSError, match="no room"), owned_folder(tmp_path, "yatt-"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / ".owner").touch()
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "yatt-link").symlink_to(target)
    assert remove_orphans(runs, "yatt-") == []
    assert (target / ".owner").exists()


def hold_a_semaphore(is_held: Any) -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    is_held.set()
    with lock:
        time.sleep(60)


@pytest.mark.parametrize("is_inside", [False, True], ids=["the folder", "a folder in it"])
def test_semaphores_of_killed_processes_go_with_the_folder(tmp_path: Path, is_inside: bool) -> None:
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    before = multiprocessing.current_process()._config["semprefix"]  # type: ignore[attr-defined]
    with owned_folder(tmp_path, "yatt-") as folder:
        named = Path(tempfile.mkdtemp(dir=folder, prefix="yatt-")) if is_inside else folder
        with semaphores_named(named):
            child = context.Process(target=hold_a_semaphore, args=(is_held,))
            child.start()
        assert is_held.wait(30)
        child.kill()
        child.join()
        assert len(list(SEMAPHORES.glob(f"sem.{named.name}-*"))) == 1
    assert not list(SEMAPHORES.glob(f"sem.{named.name}-*"))
    assert multiprocessing.current_process()._config["semprefix"] == before  # type: ignore[attr-defined]


def test_a_file_that_another_user_named_like_a_semaphore_keeps_no_folder_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yatt_mm.common.owned_dirs.SEMAPHORES", tmp_path)
    with owned_folder(tmp_path, "mine-") as folder:
        (tmp_path / f"sem.{folder.name}-first").mkdir()  # what this process cannot unlink, as another user's file
        (tmp_path / f"sem.{folder.name}-second").touch()
    assert [path.name for path in tmp_path.iterdir()] == [f"sem.{folder.name}-first"]
