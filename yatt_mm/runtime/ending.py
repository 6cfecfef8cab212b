"""The end of a run: everything that was started is ended, and no error of that hides the one that came first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def ending_with_the_first_error() -> Iterator[ExitStack]:
    """Yield a stack of what has to be ended. At the end of the block all of it is, also where an end raises.

    If the block raised, its error is raised in any case, and what went wrong afterwards is added to it as notes.
    Otherwise the last error of an end is raised.
    """
    stack = ExitStack()
    try:
        yield stack
    except BaseException as first:
        try:
            stack.__exit__(type(first), first, first.__traceback__)
        except BaseException as last:
            for later in reversed(list(_back_to(first, last))):
                first.add_note(f"while ending the run: {type(later).__name__}: {later}")
        raise
    stack.close()


def _back_to(first: BaseException, last: BaseException) -> Iterator[BaseException]:
    """Yield the errors that followed the first one, the last one before those that it came after."""
    error: BaseException | None = last
    while error is not None and error is not first:
        yield error
        # what an error was made of says nothing more
        error = (error.__cause__ or error).__context__
