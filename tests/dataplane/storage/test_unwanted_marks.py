"""Tests that marks and folders of scopes are removed without the store's lock, in an order that loses nothing."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.storage import retention_marks
from dataplane.storage.retention_marks import HELD, RetentionMarks
from dataplane.storage.scopes import Scope
from tests.dataplane.storage.test_disk_tier import BLOCK, Kit, kit  # noqa: F401  # a fixture

ONE, TWO = Path("one.arrow"), Path("two.arrow")


def names(folder: Path) -> list[str]:
    return sorted(f"{path.parent.name[:4]}/{path.name}" for path in folder.glob("*/*"))


@pytest.fixture
def marks(tmp_path: Path) -> RetentionMarks:
    return RetentionMarks(tmp_path, tmp_path / "objects")


def test_unlinking_and_removing_folders_never_holds_the_lock_of_the_store(
    kit: Kit,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit.store.scopes.open("s")
    for name in "abc":
        kit.put(name, durable=True, scope="s" if name == "c" else None)
    was_free: list[bool] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            other = threading.Thread(target=kit.store.find, args=("a",), daemon=True)
            other.start()
            other.join(20)
            was_free.append(not other.is_alive())
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for holder, name in ((Path, "unlink"), (Path, "rename"), (Path, "touch"), (shutil, "rmtree")):
            patched.setattr(holder, name, watched(getattr(holder, name)))
        assert kit.store.release("ab") == 2
        assert kit.store.scopes.close("s") == (1, BLOCK)
    assert len(was_free) >= 6 and all(was_free)
    assert names(kit.folder / "durable" / "keeps") == []
    assert not list(kit.folder.glob("**/*.arrow"))
    kit.again()
    assert kit.store.stat()["num_objects"] == kit.store.stat()["num_scopes"] == 0


def test_a_mark_that_is_made_again_before_it_was_removed_stays(marks: RetentionMarks, tmp_path: Path) -> None:
    for path in (ONE, TWO):
        marks.keep(path, None)
        marks.unmark(path, None)
    marks.keep(ONE, None)
    marks.remove_unwanted()
    assert names(tmp_path) == [f"{HELD}/one"]
    marks.unmark(ONE, None)
    marks.remove_unwanted()
    marks.keep(ONE, None)
    assert names(tmp_path) == [f"{HELD}/one"]


def test_a_scope_that_is_opened_again_before_its_folder_was_removed_keeps_what_is_new(
    marks: RetentionMarks, tmp_path: Path
) -> None:
    for is_updated in (False, True):
        old, new = Scope("s", None), Scope("s", None)
        folder = marks.keep(ONE, old)
        old.is_open = False
        marks.unmark(ONE, old)
        marks.forget_scope(old)
        if is_updated:
            marks.update_scope(new)
        marks.keep(TWO, new)
        marks.remove_unwanted()
        assert names(tmp_path) == sorted(f"{folder.name[:4]}/{name}" for name in ("scope.json", "two"))
        new.is_open = False
        marks.forget_scope(new)
        marks.remove_unwanted()
        assert names(tmp_path) == [] and not folder.exists()


def test_what_was_noted_is_gone_when_removing_returns_also_if_another_thread_removes_it(
    marks: RetentionMarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, begun, go = marks.keep(ONE, None) / "one", threading.Event(), threading.Event()
    real = Path.unlink

    def slowly(path: Path, missing_ok: bool = False) -> None:
        begun.set()
        assert go.wait(20)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slowly)
    marks.unmark(ONE, None)
    first = threading.Thread(target=marks.remove_unwanted, daemon=True)
    first.start()
    assert begun.wait(20)
    found: list[bool] = []
    second = threading.Thread(target=lambda: (marks.remove_unwanted(), found.append(mark.exists())), daemon=True)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    second.join(20)
    assert found == [False]


def test_a_disk_that_refuses_to_remove_one_mark_loses_no_other(
    marks: RetentionMarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (ONE, TWO):
        marks.keep(path, None)
        marks.unmark(path, None)
    real, left = Path.unlink, [1]

    def refuse_once(path: Path, missing_ok: bool = False) -> None:
        if left.pop() if left else 0:
            raise OSError(5, "Input/output error")
        real(path, missing_ok)

    monkeypatch.setattr(retention_marks.Path, "unlink", refuse_once)
    with pytest.raises(OSError, match="Input/output"):
        marks.remove_unwanted()
    marks.remove_unwanted()
    assert len(names(tmp_path)) == 1
