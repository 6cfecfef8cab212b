"""Progress bars of the command line, on standard error, shown only if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_CHUNK_BYTES = 16 << 20
"""The number of bytes read between two updates of the bar."""


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar of bytes during the block.

    The block gets a function to call with the number of bytes done, and the total or None while it is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int, known: int | None = None) -> None:
            progress.update(task, completed=done, total=total if known is None else known)

        yield advance


def read_file(path: Path) -> memoryview:
    """Return the bytes of a file, with a progress bar while it is read."""
    with path.open("rb") as file, bar(f"reading {path.name}", path.stat().st_size) as advance:
        data = bytearray(path.stat().st_size)
        view, at = memoryview(data), 0
        while count := file.readinto(view[at : at + _CHUNK_BYTES]):
            at += count
            advance(at, None)
        return view[:at] if at < len(data) or not file.read(1) else memoryview(path.read_bytes())
