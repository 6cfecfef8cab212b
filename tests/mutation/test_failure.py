"""Tests of what counts as a failure when the tests of a mutant are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.__main__ import _failure

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
        _failure(copy, [test], 60, marked)
