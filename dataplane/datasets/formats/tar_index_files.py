"""Keeps the indices of tars in a folder, so that a node that starts again reads them instead of all headers.

An index is known by the tar's path, size and version. One that is damaged is made again, and one that cannot be written
is only logged: the folder saves time and nothing else.
"""

import hashlib
import logging
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.tar_members import TarIndex

FORMAT = 1
"""The number of the files' format; files of another one are not read."""
_log = logging.getLogger(__name__)


def load_index(folder: Path, file: RangeFile) -> TarIndex | None:
    """Return the index that an earlier node saved of this tar as it is now; None if there is none."""
    path = _path(folder, file)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return TarIndex(dict(arrays))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be read (%s); %s is indexed again", path, error, file.path)
        return None


def save_index(folder: Path, file: RangeFile, index: TarIndex) -> None:
    """Save the index of a tar. One with flaws is not saved, because the tar may still be repaired or written."""
    if index.flaws or not file.version:  # without a version, a change of the file could not be seen
        return
    path = _path(folder, file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f"{path.name}.", dir=folder)
        try:
            with os.fdopen(handle, "wb") as out:
                np.savez(out, **index.arrays)  # type: ignore[arg-type]  # numpy's types take all of them for its options
            Path(part).replace(path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.warning("the index of %s cannot be saved in %s: %s", file.path, folder, error)


def _path(folder: Path, file: RangeFile) -> Path:
    known_by = f"{FORMAT} {file.nbytes} {file.version} {file.path}"
    return folder / f"{hashlib.blake2b(known_by.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}.npz"
