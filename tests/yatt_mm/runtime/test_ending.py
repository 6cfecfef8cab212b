"""Tests that an error at the end of a run does not hide the one that came first, and stops no other end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from yatt_mm.runtime.ending import ending_with_the_first_error


def failing(what: str) -> Callable[[], None]:
    def end() -> None:
        raise OSError(what)

    return end


def test_the_first_error_is_raised_with_the_later_ones_as_notes_and_every_end_is_reached() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="the first") as caught, ending_with_the_first_error() as stack:
        stack.callback(ended.append, "a")
        stack.callback(failing("third"))
        stack.callback(ended.append, "b")
        stack.callback(failing("second"))
        raise ValueError("the first")
    assert ended == ["b", "a"]
    assert caught.value.__notes__ == [f"while ending the run: OSError: {what}" for what in ("second", "third")]


def test_ctrl_c_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), ending_with_the_first_error() as stack:
        stack.callback(failing("later"))
        raise KeyboardInterrupt


def test_an_error_at_the_end_of_a_run_that_went_well_is_raised() -> None:
    with pytest.raises(OSError, match="cannot close"), ending_with_the_first_error() as stack:
        stack.callback(failing("cannot close"))


def test_blocks_on_the_stack_see_the_error() -> None:
    seen: list[str] = []

    @contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="x"), ending_with_the_first_error() as stack:
        stack.enter_context(block())
        raise ValueError("x")
    assert seen == ["x"]


def test_an_error_that_was_made_of_another_one_is_one_note() -> None:
    def end() -> None:
        try:
            raise OSError("no space")
        except OSError as error:
            raise RuntimeError("cannot write x: no space") from error

    with pytest.raises(ValueError, match="the first") as caught, ending_with_the_first_error() as stack:
        stack.callback(failing("third"))
        stack.callback(end)
        raise ValueError("the first")
    assert caught.value.__notes__ == [
        "while ending the run: RuntimeError: cannot write x: no space",
        "while ending the run: OSError: third",
    ]
