"""A parser without a process of its own, for tests and for tools that read their owner's files."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dataplane.datasets.formats.parser import Reply, TaskLimits
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.parsing.tasks import Tasks


class InProcess:
    """Does tasks in the thread that asks for them. Nothing limits them. Thread-safe."""

    def __init__(self) -> None:
        self.tasks = Tasks()

    def call(
        self,
        task: str,
        file: RangeFile,
        arguments: Mapping[str, Any],
        take: Callable[[Reply], None],
        limits: TaskLimits,
    ) -> None:
        """Do a task, and give each reply to `take`. Raises DatasetError if the task fails."""
        for reply in self.tasks.run(task, file, json.loads(json.dumps(arguments))):
            take(reply)
