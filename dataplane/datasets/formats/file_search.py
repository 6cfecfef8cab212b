"""Finds the files that a local glob or an fsspec URL names."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.range_files import RangeFile


def find_files(pattern: str) -> list[RangeFile]:
    """Return every file that a local glob or a `protocol://` glob matches, in name order. Raises DatasetError if the
    folder or a file cannot be read."""
    try:
        return _find_remote(pattern) if "://" in pattern else _find_local(pattern)
    except (OSError, ValueError, ImportError) as error:
        raise DatasetError(f"cannot look for {pattern!r}: {error}; check the path and that it is readable") from error


def _find_local(pattern: str) -> list[RangeFile]:
    paths = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    files = []
    for path in filter(os.path.isfile, paths):
        if not os.access(path, os.R_OK):
            raise DatasetError(f"{path} is not readable by this user; change its permissions or the pattern")
        stat = Path(path).stat()
        files.append(RangeFile(str(Path(path).absolute()), stat.st_size, str(stat.st_mtime_ns)))
    return files


def _find_remote(pattern: str) -> list[RangeFile]:
    filesystem, path = filesystem_of(pattern)
    if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
        return _find_local(path)
    if glob.has_magic(path):
        matches = filesystem.glob(path, detail=True)
    else:
        matches = {path: filesystem.info(path)} if filesystem.exists(path) else {}
    return [
        RangeFile(name, int(info["size"]), file_version(info), filesystem)
        for name, info in sorted(matches.items())
        if info.get("type") == "file"
    ]


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the path in it. Raises ValueError or ImportError if there is no
    filesystem for its protocol."""
    import fsspec  # a fifth of a node's start, and most nodes read no URL

    filesystem, path = fsspec.core.url_to_fs(url)
    return filesystem, str(path)


def file_version(info: Mapping[str, Any]) -> str:
    """Return a text that differs between contents of a remote file, as far as the store tells them apart."""
    return str(next((info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if key in info), ""))
