"""Tests of what counts as a failure when the tests of a mutant or of a named change are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation.__main__ import _failure
from tests.mutation.named import Named

ANY = "tests/test_any.py::test_any"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with one test, which passes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_any.py").write_text("def test_any():\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "told"), [("conftest.py", "pytest ended with status 4"), ("test_any.py", "ERROR tests/test_any.py")]
)
def test_a_module_that_cannot_be_imported_is_a_failure(file: str, told: str, copy: Path) -> None:
    (copy / "tests" / file).write_text("import no_such_module\n")
    assert _failure(copy, [ANY], 60).startswith(told)


@pytest.mark.parametrize(("test", "marked"), [("tests/test_any.py::test_other", ""), (ANY, "parity")])
def test_a_run_of_no_tests_is_an_error(test: str, marked: str, copy: Path) -> None:
    with pytest.raises(ValueError, match="pytest ran none of"):
        _failure(copy, [test], 60, marked=marked)


@pytest.mark.parametrize(
    ("value", "changed", "status", "verdict", "why"),
    [(1, 22, 0, "red", "assert 22 == 1"), (1, 1.0, 1, "STILL GREEN", ""), (3, 2, 1, "RED WITHOUT IT", "assert 3 == 1")],
)
def test_a_named_change_must_turn_a_test_red_that_is_green_without_it(
    value: int,
    changed: float,
    status: int,
    verdict: str,
    why: str,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    product, test = copy / "product.py", copy / "tests" / "test_any.py"
    product.write_text(f"value = {value}\n")
    test.write_text("import product\n\n\ndef test_any():\n    assert product.value == 1\n")
    change = Named(claim="it is one", test=ANY, path="product.py", before=f"= {value}", after=f"= {changed}")
    monkeypatch.setattr(mutation, "_copy", lambda _: copy)
    monkeypatch.setattr(mutation, "ALL_NAMED", (change,))
    assert mutation.try_named("") == status
    told, reason = capsys.readouterr().out.splitlines()
    assert told.startswith(f"| it is one | {verdict} | product.py: ") and reason.endswith(why)
    assert product.read_text() == f"value = {value}\n"
