"""What one start of an engine brings into the world, kept apart from it so that a failed start can be undone."""

import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from yatt_mm.common import owned_dirs
from yatt_mm.rollout import child_processes, vllm_environment
from yatt_mm.rollout.engine_types import EngineConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_TMP_DIR_LENGTH = 107 - 37
"""A socket's path holds 107 characters, of which vLLM takes a slash and a UUID."""
VLLM_SEGMENTS = "/dev/shm/vllm_dist_"
"""Through these the workers of one engine talk on the CPU; vLLM 0.32 leaves them behind."""
INTERRUPT_PERIOD_S = 0.1
"""How often a start that was given up is looked at."""


class EngineProcess:
    """vLLM's frontend, the processes behind it, and their files."""

    llm: "AsyncLLM"
    vllm_backend: Any
    child_processes: set[psutil.Process]
    """Those of the engine alone: what the caller starts later is not ours to end."""

    def __init__(self) -> None:
        self._tmp_dir: str | None = None
        self._others = child_processes.children()
        self._had_tracker = child_processes.tracker_pid() is not None
        self._launching = threading.Lock()
        self._is_given_up = False

    def launch(self, config: EngineConfig) -> None:
        """Start vLLM; blocks. Raises RuntimeError where `end` was called meanwhile, from another thread."""
        with self._launching:
            self._check_wanted()
            self._tmp_dir = tempfile.mkdtemp(prefix="yatt-engine-")
            if len(self._tmp_dir) > MAX_TMP_DIR_LENGTH:
                raise ValueError(
                    f"the temporary directory {self._tmp_dir} has {len(self._tmp_dir)} characters; names of Unix "
                    f"sockets leave room for {MAX_TMP_DIR_LENGTH}: set TMPDIR to a shorter one"
                )
            spawning = vllm_environment.spawning(num_threads=config.num_threads, tmp_dir=self._tmp_dir)
            with spawning, owned_dirs.semaphores_named(Path(self._tmp_dir)):
                from yatt_mm.rollout import vllm_backend

                self._check_wanted()
                self.backend = vllm_backend
                self.llm = vllm_backend.start_llm(config)
            self.processes = self._started()

    def end(self, timeout_s: float) -> None:
        """Shut down, then make sure: no process, no file. Waits for a `launch` that another thread is still in."""
        self._is_given_up = True
        self._interrupt_launch(timeout_s / 2)
        started = self.processes if "processes" in self.__dict__ else self._started()
        segments = child_processes.mapped(started, VLLM_SEGMENTS)
        if "llm" in self.__dict__:
            self.llm.shutdown(timeout=timeout_s / 2)
            del self.llm
        if not self._had_tracker:
            child_processes.stop_tracker()
        child_processes.end(started, timeout_s)
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._tmp_dir is not None:
            owned_dirs.remove(Path(self._tmp_dir))

    def _interrupt_launch(self, timeout_s: float) -> None:
        """A thread cannot be stopped, but what it waits for can: vLLM fails when its core ends."""
        deadline = time.monotonic() + timeout_s
        while not self._launching.acquire(timeout=INTERRUPT_PERIOD_S):
            child_processes.ask_to_end(self._started())
            if time.monotonic() > deadline:
                logger.error("an engine's start goes on %g s after it was given up", timeout_s)
                return
        self._launching.release()

    def _check_wanted(self) -> None:
        if self._is_given_up:
            raise RuntimeError("the engine's start was given up")

    def _started(self) -> set[psutil.Process]:
        return {
            process
            for process in child_processes.children() - self._others
            if process.pid != child_processes.tracker_pid()
        }
