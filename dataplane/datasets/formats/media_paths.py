"""Finds media files that rows name by path: only in folders that the node's owner allowed, also if the path has `..` or
links.

A path is relative to the folder of the file that names it. It may lead into that folder, into the registered root's
folder, or into an additional folder of the owner (`--media-root`). URLs are never followed.
"""

import errno
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.datasets.formats.file_search import file_version
from dataplane.datasets.formats.range_files import RangeFile, open_local, path_of


class RefusedPathError(Exception):
    """A path cannot be used. The text becomes the reason in the quarantine."""


@dataclass(frozen=True, slots=True)
class MediaFolders:
    """The folders that may hold the media of one shard."""

    home: str
    """The folder of the shard."""
    allowed: tuple[str, ...]
    """The folders whose files may be read; `home` is one of them. The paths of local folders have no links."""
    filesystem: Any = None

    def find(self, path: str) -> RangeFile:
        """Return the file that a row names. Raises RefusedPathError with what was found and wanted."""
        if "://" in path or path.startswith("data:"):
            raise RefusedPathError(f"{path[:80]!r} is a URL; a node follows none: wanted a path")
        if "\0" in path:
            raise RefusedPathError(f"{path[:80]!r} has a zero byte; wanted a path")
        return self._find_local(path) if self.filesystem is None else self._find_remote(path)

    def _find_local(self, path: str) -> RangeFile:
        full = os.path.realpath(os.path.join(self.home, path))  # noqa: PTH118
        self._check_allowed(path, full, os.sep)
        try:
            fd = open_local(full)
        except OSError as error:
            words = "is no file" if error.errno == errno.EINVAL else f"cannot be read: {error.strerror}"
            raise RefusedPathError(f"{path!r} {words} ({full})") from error
        try:
            found, stat = path_of(fd), os.fstat(fd)
        finally:
            os.close(fd)
        # the opened file counts, because links may have changed since the first check
        self._check_allowed(path, found, os.sep)
        return RangeFile(found, stat.st_size, str(stat.st_mtime_ns), no_links=True)

    def _find_remote(self, path: str) -> RangeFile:
        full = posixpath.normpath(posixpath.join(self.home, path))
        self._check_allowed(path, full, "/")
        try:
            info = self.filesystem.info(full)
        except (OSError, ValueError) as error:
            raise RefusedPathError(f"{path!r} cannot be read: {type(error).__name__} {error}") from error
        if info.get("type") != "file" or info.get("size") is None:
            raise RefusedPathError(f"{path!r} is no file of a known size ({full})")
        return RangeFile(full, int(info["size"]), file_version(info), self.filesystem)

    def _check_allowed(self, path: str, full: str, separator: str) -> None:
        if not any(full.startswith(folder.rstrip(separator) + separator) for folder in self.allowed):
            raise RefusedPathError(
                f"{path!r} leads to {full}, outside of {', '.join(self.allowed)}; move the file, or allow its folder: "
                "data.media_roots of a run, --media-root of a node"
            )


def media_folders(file: RangeFile, root_folder: str, extra: Sequence[Path]) -> MediaFolders:
    """Return the folders in which the rows of a shard may name media. The shard was found below `root_folder`; `extra`:
    more folders that the owner of the node allows."""
    home = posixpath.dirname(file.path)
    if file.filesystem is not None:
        return MediaFolders(home, tuple(dict.fromkeys([home, root_folder])), file.filesystem)
    allowed = [os.path.realpath(str(folder)) for folder in (home, root_folder, *extra) if str(folder)]
    return MediaFolders(home, tuple(dict.fromkeys(allowed)))
