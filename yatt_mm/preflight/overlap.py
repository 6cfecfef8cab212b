"""Finds held-out files on which the run would train."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.roots import find_dataset_files
from yatt_mm.config.eval_section import held_out_key_of
from yatt_mm.config.run_config import Config
from yatt_mm.preflight.run_sets import held_out_sections, key_of

END_BYTES = 1 << 16
"""The bytes of each end of a file that are compared. Files of the same size and ends count as equal."""


def overlaps(config: Config) -> Iterator[str]:
    """Yield a warning for each training set that has files in common with a held-out set. Files of a node that the user
    started are not looked at."""
    for one in config.data.train if config.dataplane.uri is None else ():
        for name, held_out in held_out_sections(config).items():
            if both := files_in_both(one.path, held_out.path):
                yield (
                    f"{key_of(one)} and {held_out_key_of(name)} have {len(both)} file(s) in common, such as {both[0]}: "
                    "the run trains on held-out samples, so their accuracy says nothing about others"
                )


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
