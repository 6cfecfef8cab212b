"""The manifest of a checkpoint: the size and the BLAKE3 digest of each file, by which damage is found before a run
continues.

The writers of large files record each one in a small file beside it (`note_written`), and `write_manifest` records the
rest. A file counts as recorded once it is on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from dataplane.core.disk_sync import sync_directory, sync_file
from yatt_mm.common.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
WRITTEN = ".written"
"""The end of the name of a record, which follows the name of its file."""
FORMAT = 2
"""The version of the format of checkpoints."""
CHUNK_BYTES = 8 << 20
NUM_READERS = 4
"""The number of files that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest says of a file."""

    nbytes: int
    blake3: str
    """The digest of its content, as hexadecimal text."""


def record_file(path: Path) -> FileRecord:
    """Bring a file to the disk and return its record. Raises OSError."""
    sync_file(path)
    return _read(path)


def note_written(path: Path, record: FileRecord) -> None:
    """Say in a file beside it that a file is whole and on the disk. Raises OSError."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.rename(path.with_name(path.name + WRITTEN))


def num_written(folder: Path) -> int:
    """Return the number of files in a folder that were recorded so far."""
    return len(list(folder.glob(f"*{WRITTEN}")))


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder, and bring it and the folders to the disk. The records of
    `note_written` are removed. Raises OSError."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    recorded = {}
    for path in folder.glob(f"*{WRITTEN}"):
        recorded[path.name.removesuffix(WRITTEN)] = FileRecord(**json.loads(path.read_text()))
        path.unlink()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    files = {name: recorded.get(name) or record_file(path) for name, path in zip(names, paths)}
    for name in recorded.keys() - files.keys():
        raise FileNotFoundError(f"{folder / name} was written and is gone")
    (folder / MANIFEST_FILE).write_text(_text(files))
    sync_file(folder / MANIFEST_FILE)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync_directory(inner)
    sync_directory(folder)


def check_files(folder: Path) -> None:
    """Read all files of a checkpoint and compare them with its manifest.

    Raises:
        CheckpointError: a file is missing, or has another size or content; the message names it.
    """
    files = files_of(folder)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for problem in pool.map(lambda name: _problem(folder / name, files[name]), files):
            if problem:
                raise CheckpointError(problem)


def files_of(folder: Path) -> dict[str, FileRecord]:
    """Return what the manifest of a checkpoint says of its files.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes().decode()
        found = json.loads(text)
        version, records = found["format"], found["files"].items()
        files = {name: FileRecord(**record) for name, record in records}
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST_FILE}, so it is not a committed checkpoint, or an earlier version wrote it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    if text != _text(files, version):
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} was written by another version of this program (format {version}; this one reads {FORMAT}); "
            "go on with that version, or start a new run from the model that it exported"
        )
    return files


def _text(files: Mapping[str, FileRecord], version: int = FORMAT) -> str:
    """Return the manifest's text. It has a digest of itself, so that it can change nowhere without being noticed."""
    records = {name: asdict(files[name]) for name in sorted(files)}
    own = blake3(json.dumps(records).encode()).hexdigest()
    return json.dumps({"format": version, "files": records, "blake3": own}, indent=1) + "\n"


def _problem(path: Path, wanted: FileRecord) -> str:
    """Return what is wrong with a file; an empty text if nothing is."""
    try:
        nbytes = path.stat().st_size
        if nbytes != wanted.nbytes:
            return f"{path} is damaged: it has {nbytes} bytes, and {MANIFEST_FILE} says {wanted.nbytes}"
        if _read(path) != wanted:
            return f"{path} is damaged: its content is not that of which {MANIFEST_FILE} has the digest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return ""


def _read(path: Path) -> FileRecord:
    """Read a file once and return its record. It is not mapped, because a fault of the disk would end the process."""
    digest, nbytes = blake3(max_threads=blake3.AUTO), 0
    size = min(CHUNK_BYTES, path.stat().st_size + 1)  # clearing a whole chunk takes longer than a small file
    buffer = memoryview(bytearray(size))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(buffer):
            digest.update(buffer[:num])
            nbytes += num
    return FileRecord(nbytes=nbytes, blake3=digest.hexdigest())
