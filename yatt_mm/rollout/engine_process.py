"""The processes and files of one engine start: vLLM's frontend, its children, its temporary folder.

They are kept apart from `VllmEngine`, so that a start that failed or was cancelled can be undone completely.
"""

import logging
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from yatt_mm.common import owned_dirs
from yatt_mm.common.large_imports import large_imports
from yatt_mm.rollout import child_processes, vllm_environment
from yatt_mm.rollout.engine_types import EngineConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_TMP_DIR_LENGTH = owned_dirs.MAX_SOCKET_LENGTH - 37
"""The number of characters of the folder for sockets: vLLM adds a slash and a UUID."""
VLLM_SEGMENTS = "/dev/shm/vllm_dist_"
"""The prefix of the shared-memory files through which the workers of one engine communicate on the CPU. vLLM 0.32 does
not remove them."""
INTERRUPT_PERIOD_S = 0.1
"""The seconds between attempts to interrupt a start that was given up."""


class EngineProcess:
    """One start of vLLM: its frontend, the processes behind it, and their files.

    `launch` starts them, `end` removes them.
    """

    llm: "AsyncLLM"
    """vLLM's frontend."""
    backend: Any
    """The module `vllm_backend`, imported inside the prepared environment."""
    processes: set[psutil.Process]
    """The processes of this engine alone, without those that the caller started before or starts later."""

    def __init__(self) -> None:
        self._folder = ExitStack()
        """Owns the folder for temporary files. That of an engine whose process was killed goes with the next one's
        start."""
        self._others = child_processes.children()
        self._had_tracker = child_processes.tracker_pid() is not None
        self._launching = threading.Lock()
        self._is_given_up = False

    def launch(self, config: EngineConfig) -> None:
        """Start vLLM and wait until it is ready.

        Raises RuntimeError if another thread has called `end` in the meantime.
        """
        with self._launching:
            self._check_wanted()
            owned = owned_dirs.owned_folder(Path(tempfile.gettempdir()), "yatt-engine-")
            folder = self._folder.enter_context(owned)
            if len(str(folder)) > MAX_TMP_DIR_LENGTH:
                raise ValueError(
                    f"the temporary directory {folder} has {len(str(folder))} characters; names of Unix "
                    f"sockets leave room for {MAX_TMP_DIR_LENGTH}: set TMPDIR to a shorter path"
                )
            spawning = vllm_environment.spawning(num_threads=config.num_threads, tmp_dir=str(folder))
            with spawning, owned_dirs.semaphores_named(folder):
                with large_imports():
                    from yatt_mm.rollout import vllm_backend

                self._check_wanted()
                self.backend = vllm_backend
                self.llm = vllm_backend.start_llm(config)
            self.processes = self._started()

    def end(self, timeout_s: float) -> None:
        """Kill all processes of this engine and remove their files.

        vLLM's own end would first free its memory object by object, which takes seconds; the system frees it at once.

        Waits for: a `launch` that another thread has not finished.  Unblocked by: its end, or half of `timeout_s`.
        """
        self._is_given_up = True
        self._interrupt_launch(timeout_s / 2)
        started = self.processes if "processes" in self.__dict__ else self._started()
        segments = child_processes.mapped(started, VLLM_SEGMENTS)
        child_processes.kill(started)
        if "llm" in self.__dict__:
            self.llm.shutdown(timeout=timeout_s / 2)
            del self.llm
        if not self._had_tracker:
            child_processes.stop_tracker()
        child_processes.wait_for_end(started, timeout_s)
        for segment in segments:
            segment.unlink(missing_ok=True)
        self._folder.close()

    def _interrupt_launch(self, timeout_s: float) -> None:
        """Make a `launch` in another thread fail.

        A thread cannot be stopped, but vLLM fails when its core process ends.
        """
        deadline = time.monotonic() + timeout_s
        while not self._launching.acquire(timeout=INTERRUPT_PERIOD_S):
            child_processes.kill(self._started())
            if time.monotonic() > deadline:
                logger.error("an engine's start still runs %g s after it was given up", timeout_s)
                return
        self._launching.release()

    def _check_wanted(self) -> None:
        """Check that `end` was not called."""
        if self._is_given_up:
            raise RuntimeError("the engine's start was given up")

    def _started(self) -> set[psutil.Process]:
        """Return the processes that exist now and did not exist before this start, without the resource tracker."""
        return {
            process
            for process in child_processes.children() - self._others
            if process.pid != child_processes.tracker_pid()
        }
