"""Whether the files that a host reads for itself are copies of those of the launcher's host."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

BLOCK_BYTES = 4096
"""The bytes that are read of the begin, the middle and the end of a file."""
NUM_THREADS = 16
OF_MODELS = frozenset({".jinja", ".json", ".model", ".safetensors", ".txt"})
"""The endings of the files from which a model and its processor are read."""


def marks_of_model(folder: str) -> dict[str, str]:
    """Return the marks of the files of a model, by their names."""
    files = [file for file in Path(folder).glob("*") if file.suffix in OF_MODELS]
    return dict(zip([file.name for file in files], _marks(files)))


def marks_of_set(name: str, patterns: Sequence[str]) -> dict[str, str]:
    """Return the marks of a data set's files, by their paths. Those of URLs are empty: all hosts read the same.

    Raises:
        DatasetError: a pattern matches nothing.
    """
    from dataplane.datasets.roots import find_dataset_files  # it imports more than a controller may

    paths = [found.file.path for found in find_dataset_files(name, patterns)]
    local = [path for path in paths if "://" not in path]
    return dict.fromkeys(paths, "") | dict(zip(local, _marks(map(Path, local))))


def marks_of_reward(path: str) -> dict[str, str]:
    """Return the mark of the file of a reward function, `file.py:name` or `module:name`; none if it is not there."""
    source = path.rpartition(":")[0]
    if source.endswith(".py"):
        file = Path(source)
    else:
        try:
            found = importlib.util.find_spec(source)
        except ImportError:
            found = None
        if found is None or found.origin is None:
            return {}
        file = Path(found.origin)
    return {file.name: _mark(file)} if file.is_file() else {}


def difference(wanted: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return the first difference between the marks of the launcher's host and those of this one."""
    for name in sorted(wanted.keys() | here.keys()):
        if name not in here:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not on the launcher's host"
        if wanted[name] != here[name]:
            return f"{name} is not the same as on the launcher's host"
    return None


def _marks(files: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(_mark, files))


def _mark(file: Path) -> str:
    """Return the size of a file with a digest of some of its blocks, or why it cannot be read."""
    try:
        with file.open("rb") as opened:
            size, digest = os.fstat(opened.fileno()).st_size, blake2b(digest_size=8)
            for at in (0, size // 2, max(0, size - BLOCK_BYTES)):
                digest.update(os.pread(opened.fileno(), BLOCK_BYTES, at))
    except OSError as error:
        return str(error.strerror)
    return f"{size} {digest.hexdigest()}"
