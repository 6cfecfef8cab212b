"""A queue with threads that run its tasks. Urgent tasks, which callers wait for, run before prefetching.

*Consumes* tasks from any thread, *produces* futures. A task that is not urgent becomes urgent when a caller begins to
wait for it. All tasks that are not urgent can be cancelled together.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    future: "Future[Any]"
    call: Callable[[], Any]


class PriorityQueue:
    """The tasks wait in two queues, and `num_threads` threads run them. The threads are daemons: `close` waits for none
    of them."""

    def __init__(self, num_threads: int) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[_Task] = deque()
        self._ahead: dict[Future[Any], _Task] = {}
        self._is_closed = False
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"pool-{number}", daemon=True).start()

    def submit(self, call: Callable[[], Any], *, is_urgent: bool = True) -> "Future[Any]":
        """Return the future of `call()`. An urgent task runs after earlier urgent tasks; a task that is not urgent runs
        after all urgent ones."""
        task = _Task(Future(), call)
        with self._changed:
            if self._is_closed:
                task.future.cancel()
            elif is_urgent:
                self._urgent.append(task)
            else:
                self._ahead[task.future] = task
            self._changed.notify()
        return task.future

    def promote(self, future: "Future[Any]") -> None:
        """Make a task urgent, if it still waits in the queue."""
        with self._changed:
            task = self._ahead.pop(future, None)
            if task is not None:
                self._urgent.append(task)

    def cancel_waiting(self) -> "set[Future[Any]]":
        """Cancel every task that is not urgent and has not begun; return the cancelled futures."""
        with self._changed:
            cancelled = set(self._ahead)
            self._ahead.clear()
        for future in cancelled:
            future.cancel()
        return cancelled

    @property
    def num_ahead(self) -> int:
        """The number of waiting tasks that are not urgent."""
        return len(self._ahead)

    def close(self) -> None:
        """Cancel the tasks that have not begun. Each thread ends after its present task."""
        with self._changed:
            self._is_closed = True
            waiting = [task.future for task in self._urgent]
            self._urgent.clear()
            self._changed.notify_all()
        for future in waiting:
            future.cancel()
        self.cancel_waiting()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                result = task.call()
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
            del task  # the result must not live until the next task comes

    def _take(self) -> _Task | None:
        with self._changed:
            while not (self._urgent or self._ahead):
                if self._is_closed:
                    return None
                self._changed.wait()
            if self._urgent:
                return self._urgent.popleft()
            return self._ahead.pop(next(iter(self._ahead)))
