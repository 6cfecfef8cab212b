"""One helper thread that works while its caller continues, one call at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Ahead:
    """A helper thread that runs calls one after the other. Only one thread may use this object."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._doing: Future[object] | None = None

    def then(self, call: Callable[[], object]) -> None:
        """Start `call` in the helper thread. This waits for the call before it, and raises the error of that call."""
        self.wait()
        self._doing = self._threads.submit(call)

    def wait(self) -> None:
        """Wait until the last call is finished. Raises its error."""
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()

    def end(self) -> None:
        """Wait until the last call has ended, and ignore its error."""
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.exception()
