"""The node's end of one parser process: it is started with a clean environment, asked, and ended."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataplane.core.child_process import child_environment, wait_for_killed
from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.parser import Reply, TaskLimits
from dataplane.datasets.formats.range_files import RangeFile, open_local
from dataplane.datasets.parsing.frames import Frame, FrameError, FrameSocket, Kind

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""The time in seconds that a killed process has to end. One that waits for a disk may not end before the disk
answers."""
SEND_TIMEOUT_S = 60.0
MAX_READ_BYTES = 1 << 30
"""The largest range of a remote file that is read for a parser."""

log = logging.getLogger(__name__)


class ParserDiedError(Exception):
    """The process has ended. `code` is its exit status, negative for a signal; None if it did not say."""

    def __init__(self, text: str, code: int | None = None, *, was_asked: bool = True) -> None:
        super().__init__(text)
        self.code = code
        self.was_asked = was_asked
        """False if it had died before the file was given to it."""


class ParserProcess:
    """One child process. One thread at a time may ask it. Raises ParserDiedError or OverdueError if it does not start.

    It ends with the thread that made it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "dataplane.datasets.parsing.process_main", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).resolve().parents[3],
                env=child_environment(os.environ),
            )
        self._socket = FrameSocket(ours)
        self.pid = self._process.pid
        self.is_idle = True
        """False while it does a task, and after a task that was not done to its end."""
        try:
            self._receive(START_TIMEOUT_S, 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def call(
        self,
        task: str,
        file: RangeFile,
        arguments: Mapping[str, Any],
        take: Callable[[Reply], None],
        limits: TaskLimits,
    ) -> None:
        """Do a task, and give each reply to `take`. Raises DatasetError if the task fails, ParserDiedError and
        OverdueError, and the errors of `take`."""
        self.is_idle = False
        self._request(task, file, arguments)
        left_s = limits.timeout_s
        unread: DatasetError | None = None
        while True:
            started = time.monotonic()
            frame = self._receive(left_s, limits.max_reply_bytes)
            left_s -= time.monotonic() - started  # the node's own reads do not count
            if frame.kind in (Kind.REPLY, Kind.LAST):
                self.is_idle = frame.kind == Kind.LAST
                take(Reply(frame.head, frame.buffers))
                if self.is_idle:
                    return
            elif frame.kind == Kind.READ:
                unread = self._read_for_it(file, frame) or unread
            elif frame.kind == Kind.END:
                self.is_idle = True
                return
            elif frame.kind == Kind.ERROR:
                self.is_idle = True
                raise unread or DatasetError(_text_of(frame))
            else:
                raise self._death(f"sent a frame {frame.kind.name}")

    def close(self) -> None:
        """End the process. Calling this twice is safe. Waits for the process, at most `END_TIMEOUT_S`."""
        if self._process.poll() is None:
            self._process.kill()
        self._socket.close()
        wait_for_killed(self._process, "parser", END_TIMEOUT_S)

    def _request(self, task: str, file: RangeFile, arguments: Mapping[str, Any]) -> None:
        described = {"path": file.path, "nbytes": file.nbytes, "version": file.version}
        head = json.dumps({"task": task, "file": described, "arguments": arguments}).encode()
        try:
            fd = open_local(file.path, no_links=file.no_links) if file.is_local else None
        except OSError as error:
            self.is_idle = True
            raise DatasetError(f"cannot read {file.path}: {error}; check that it is there") from error
        try:
            self._socket.send(Kind.REQUEST, head, fd=fd, timeout_s=SEND_TIMEOUT_S)
        except OSError as error:
            raise self._death(str(error), was_asked=False) from error
        finally:
            if fd is not None:
                os.close(fd)

    def _read_for_it(self, file: RangeFile, frame: Frame) -> DatasetError | None:
        """Read a range of a remote file, and send it. Return the error if it cannot be read."""
        try:
            offset, nbytes = json.loads(frame.head)
            if file.is_local or not (0 <= offset <= file.nbytes and 0 <= nbytes <= MAX_READ_BYTES):
                raise self._death(f"asked for {nbytes} bytes at {offset}")
            data = file.read(offset, nbytes)
        except DatasetError as error:
            self._socket.send(Kind.UNREAD, str(error).encode("utf-8", "replace"), timeout_s=SEND_TIMEOUT_S)
            return error
        except (ValueError, TypeError) as error:
            raise self._death(f"asked for {frame.head[:40]!r}") from error
        try:
            self._socket.send(Kind.BYTES, buffers=[data], timeout_s=SEND_TIMEOUT_S)
        except OSError as error:
            raise self._death(str(error)) from error
        return None

    def _receive(self, timeout_s: float, max_bytes: int) -> Frame:
        try:
            return self._socket.receive(max_bytes, timeout_s)
        except (EOFError, OSError, FrameError) as error:
            raise self._death(str(error)) from error

    def _death(self, how: str, *, was_asked: bool = True) -> ParserDiedError:
        """Return the error for a process that has ended, or that did what no parser does; end it then."""
        try:
            code: int | None = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        return ParserDiedError(f"{how}, exit status {code}", code, was_asked=was_asked)


def _text_of(frame: Frame) -> str:
    try:
        return str(json.loads(frame.head))
    except (ValueError, RecursionError):
        return "the task failed, and the parser did not say why"
