"""Makes the Ray actors of a run: each ends with the run, writes what it prints to a log file of its own, and shows what
it has done."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from yatt_mm.common.log_file import write_output_to
from yatt_mm.common.progress import PROGRESS, progress_path

QUIET = {"enable_task_events": False}
"""Options of actors whose calls are not reported to Ray's server, which nothing of a run asks about them."""


def create(stack: ExitStack, body: type, *, log: Path, concurrency: int, **options: Any) -> Any:
    """Return the constructor of an actor that ends with `stack`.

    body: the class of the actor. log: the file for everything that the actor and its children print. concurrency: the
    most calls at the same time. options: those of Ray.
    """
    settings: dict[str, Any] = {"num_cpus": 0, "max_concurrency": concurrency, **QUIET, **options}
    remote: Any = ray.remote(_logged(body, log.absolute())).options(**settings)

    def construct(**arguments: Any) -> Any:
        handle: Any = remote.remote(**arguments)
        stack.callback(ray.kill, handle)
        return handle

    return construct


def _logged(body: Any, log: Path) -> type:
    """Return the same class, whose objects first turn the output of their process to the log file, and open the file
    with their progress."""

    class Logged(body):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            write_output_to(log)
            PROGRESS.open(progress_path(log.name))
            super().__init__(**arguments)

    Logged.__name__ = Logged.__qualname__ = body.__name__
    return Logged
