"""One thing at a time that another thread does while its caller goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Ahead:
    """What one thread has others do, one thing after the other. Used by that thread only."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._doing: Future[object] | None = None

    def then(self, call: Callable[[], object]) -> None:
        """Do this next. Waits for what was to be done before, and raises what came of it."""
        self.wait()
        self._doing = self._threads.submit(call)

    def wait(self) -> None:
        """Until it is done. Raises what came of it."""
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()

    def end(self) -> None:
        """Until it has ended, whatever came of it."""
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.exception()
