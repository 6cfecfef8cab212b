"""Standard output and error that outlive their terminal: a run that saves itself when its terminal is closed does not
end because no one can read what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutlivingStream:
    """A text stream whose output goes nowhere once its terminal or pipe is gone. All else is as in the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, if it can still be read."""
        try:
            return self._stream.write(text)
        except OSError:
            self._go_nowhere()
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError:
            self._go_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _go_nowhere(self) -> None:
        """Let the stream's descriptor lead nowhere, also for what it has buffered."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def outliving_streams() -> Iterator[None]:
    """Let standard output and error outlive their terminal during a block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = OutlivingStream(sys.stdout), OutlivingStream(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
