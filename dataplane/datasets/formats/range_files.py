"""Reads byte ranges of big files, local or remote (any fsspec filesystem), without holding the file in memory."""

import errno
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from dataplane.core.errors import DatasetError

READ_AHEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RangeFile:
    """A file that is read by byte range. `path` belongs to `filesystem`; None means a local file."""

    path: str
    nbytes: int
    version: str = ""
    """A text that changes when the file changes: its modification time, or the version of the remote store."""
    filesystem: Any = None
    no_links: bool = False
    """True if `path` led to the file without links when it was checked, and must do so at every read."""
    fd: int | None = field(default=None, compare=False)
    """A descriptor of the local file, for a process that may not open `path`."""

    @property
    def is_local(self) -> bool:
        """True if a worker process can open the path itself."""
        return self.filesystem is None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes from `offset` to `offset + nbytes`; fewer at the end of the file. Raises DatasetError if the
        file cannot be read."""
        end = min(offset + nbytes, self.nbytes)
        if end <= offset:
            return b""
        try:
            if self.fd is not None:
                return read_open(self.fd, offset, end - offset)
            if self.filesystem is None:
                return read_local(self.path, offset, end - offset, no_links=self.no_links)
            return bytes(self.filesystem.cat_file(self.path, start=offset, end=end))
        except OSError as error:
            raise DatasetError(f"cannot read {self.path} at {offset}: {error}; check that it is there") from error

    def check_unchanged(self) -> None:
        """Raise DatasetError if a local file was changed after it was indexed. Changes of remote files are found by
        their digests."""
        if self.filesystem is not None:
            return
        try:
            stat = Path(self.path).stat()
        except OSError as error:
            raise DatasetError(f"cannot read {self.path}: {error}; it was there when it was ingested") from error
        if stat.st_size != self.nbytes or self.version not in ("", str(stat.st_mtime_ns)):
            raise DatasetError(
                f"{self.path} changed since it was ingested ({self.nbytes} bytes then, {stat.st_size} now); ingest the "
                "dataset again"
            )


class RangeStream(io.RawIOBase):
    """A RangeFile as a seekable binary file object, for libraries that need one."""

    def __init__(self, file: RangeFile) -> None:
        super().__init__()
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the present position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, and return the new position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes from the present position."""
        data = self._file.read(self._at, self._file.nbytes - self._at if size is None or size < 0 else size)
        self._at += len(data)
        return data


class BufferedRanges:
    """Buffers sequential small reads of a RangeFile, so that a shard of small members needs few requests."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self._start = 0
        self._buffer = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the same bytes as `RangeFile.read`, from the last block if it holds the range."""
        if not (self._start <= offset and offset + nbytes <= self._start + len(self._buffer)):
            self._start, self._buffer = offset, self._file.read(offset, max(nbytes, READ_AHEAD_BYTES))
        at = offset - self._start
        return self._buffer[at : at + nbytes]


def read_local(path: str, offset: int, nbytes: int, *, no_links: bool = False) -> bytes:
    """Return bytes of a local file, read with `pread`; fewer bytes at its end. Raises OSError like `open_local`."""
    fd = open_local(path, no_links=no_links)
    try:
        return read_open(fd, offset, nbytes)
    finally:
        os.close(fd)


def read_open(fd: int, offset: int, nbytes: int) -> bytes:
    """Return bytes of an open file, read with `pread`; fewer bytes at its end. Raises OSError."""
    parts, done = [], 0
    while done < nbytes:
        part = os.pread(fd, nbytes - done, offset + done)
        if not part:
            break
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def open_local(path: str, *, no_links: bool = False) -> int:
    """Return a descriptor of a regular file. Raises OSError for everything else, and for a path with links if
    `no_links`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)  # opening a pipe does not block then
    try:
        if not S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file", path)
        if no_links and path_of(fd) != path:
            raise OSError(errno.ELOOP, f"a link leads to {path_of(fd)} by now; none may", path)
    except OSError:
        os.close(fd)
        raise
    return fd


def path_of(fd: int) -> str:
    """Return the path of a descriptor's file, without links."""
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
