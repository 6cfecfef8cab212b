"""Finds held-out files that the run would train on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.roots import find_dataset_files

END_BYTES = 1 << 16
"""The bytes of each end of a file that are compared. Files of the same size and ends count as equal."""


def files_in_both(train: str, held_out: str) -> list[str]:
    """Return the paths of the held-out files that are among the training files too, also as copies. `train`,
    `held_out`: patterns of data sets."""
    trained, tested = (_files(pattern) for pattern in (train, held_out))
    sizes = {file.nbytes for file in trained}
    suspects = [file for file in tested if file.nbytes in sizes]
    if not suspects:
        return []
    wanted = {file.nbytes for file in suspects}
    ends = {_ends(file) for file in trained if file.nbytes in wanted}
    return [file.path for file in suspects if _ends(file) in ends]


def _files(pattern: str) -> Sequence[RangeFile]:
    return [item.file for item in find_dataset_files("data", [pattern])]


def _ends(file: RangeFile) -> tuple[int, bytes]:
    data = file.read(0, END_BYTES) + file.read(max(0, file.nbytes - END_BYTES), END_BYTES)
    return file.nbytes, hashlib.blake2b(data).digest()
