"""The files of a node's disk tier: files of spilled objects, which end with the node, and of durable objects, which
survive it.

    DIR/lock                    held while a node uses DIR
    DIR/spill/*.arrow           removed when a node starts
    DIR/durable/objects/*.arrow one object each
    DIR/durable/keeps/          what keeps each of them (retention_marks.py)

A durable object lives while something keeps it. The next start removes objects that nothing keeps. This class counts no
budget and takes only its own lock: the store decides what is spilled, and when.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from dataplane.core.digests import digest_of
from dataplane.core.disk_sync import sync_directory, sync_file
from dataplane.core.errors import BadRequestError, ChecksumError, OutOfSpaceError, OverloadedError
from dataplane.core.refs import Ref
from dataplane.core.shared_files import identity, open_own_file
from dataplane.storage.group_commit import GroupCommit
from dataplane.storage.ipc_file import OVERHEAD_BYTES, read_ipc, write_ipc
from dataplane.storage.retention_marks import HELD, RetentionMarks
from dataplane.storage.scopes import Scope

_BLOCK_BYTES = 4 << 20
"""The bytes that are read at once to compute a digest."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file that holds one object."""

    path: Path
    offset: int
    nbytes: int
    """The size of the whole file, in bytes."""
    charge_bytes: int
    """The bytes that the file counts in the spill budget."""
    is_durable: bool
    identity: Mapping[str, int]
    is_checked: bool = False
    """True if the content was compared with its digest."""

    def describe(self) -> dict[str, Any]:
        """Return path, size, device and inode: readers need them to map the file and to check that it is this one."""
        return {"path": str(self.path), "nbytes": self.nbytes, **self.identity}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A durable object of an earlier node."""

    ref: Ref
    digest: str
    file: DiskFile
    is_held: bool
    scopes: tuple[Mapping[str, Any], ...] = field(default=())
    """The name, quota_bytes, keep and owners of each scope that held the object."""


def charge_bytes(nbytes: int) -> int:
    """Return the bytes that an object of `nbytes` counts in the spill budget."""
    return -(-nbytes // 4096) * 4096 + OVERHEAD_BYTES


class DiskFiles:
    """The files under one directory, which this object locks. Thread-safe."""

    def __init__(self, directory: Path, budget_bytes: int, node_id: str) -> None:
        """Lock the directory. BadRequestError if another node uses it, OutOfSpaceError if the directory cannot be
        written."""
        self.budget_bytes = budget_bytes
        self._node_id = node_id
        self._spill, self._objects = directory / "spill", directory / "durable" / "objects"
        self._commits = GroupCommit()
        try:
            self._keeps = RetentionMarks(directory / "durable" / "keeps", self._objects)
            self._objects.mkdir(exist_ok=True)
            for folder in (directory / "durable" / "keeps", directory / "durable", directory):
                sync_directory(folder)
            # the directory was there before and may be entered, but not read
            with contextlib.suppress(PermissionError):
                sync_directory(directory.parent)
            self._lock = (directory / "lock").open("a+b", buffering=0)
            directory.chmod(0o700)
        except OSError as error:
            raise OutOfSpaceError(
                f"--spill {directory} cannot be written ({error.strerror}); choose another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with self._lock:
                owner = os.pread(self._lock.fileno(), 100, 0).decode(errors="replace").strip()
            raise BadRequestError(
                f"--spill {directory} is used by {owner or 'another node'}; give every node a directory of its own"
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"node {node_id}, process {os.getpid()}".encode())
        shutil.rmtree(self._spill, ignore_errors=True)
        self._spill.mkdir(exist_ok=True)

    def close(self) -> None:
        """Remove the files that are not durable, and unlock the directory. A second call does nothing, because another
        node may use the directory by then."""
        if self._lock.closed:
            return
        shutil.rmtree(self._spill, ignore_errors=True)
        self._lock.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, ref: Ref, digest: str, data: np.ndarray) -> DiskFile:
        """Write a file that ends with this node, and return its description. Raises OutOfSpaceError if the disk refuses
        it."""
        return self._write(self._spill / f"{secrets.token_hex(8)}.arrow", ref, digest, data)

    def write_durable(
        self, ref: Ref, digest: str, data: np.ndarray, scope: Scope | None, *, is_synced: bool = True
    ) -> DiskFile:
        """Write a file that survives this node. It is kept by `scope`, or held if that is None. With `is_synced` the
        file is on the disk when this returns; else it survives the node, but perhaps not the machine.

        Waits for: one sync, shared with other writers of the same moment.
        """
        key = blake3(ref.name.encode()).hexdigest()[:24]
        # the random part keeps two writers from sharing a file
        path = self._objects / f"{key}-{secrets.token_hex(8)}.arrow"
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        file = self._write(temporary, ref, digest, data)
        try:
            folders = [self.keep(path, scope), self._objects]
            if is_synced:
                self._commits.commit(temporary, path, folders)
            else:
                temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            self.discard(replace(file, path=path), scope)
            if isinstance(error, OSError):
                raise _shortage(path, error) from error
            raise
        return replace(file, path=path, is_durable=True)

    def keep(self, path: Path, scope: Scope | None) -> Path:
        """Mark a durable file as kept by `scope`, or as held if that is None. Return the folder to sync. OSError comes
        from the disk."""
        return self._keeps.keep(path, scope)

    def sync(self, file: DiskFile) -> None:
        """Wait until a durable file is on the disk under its name. OSError comes from the disk."""
        sync_file(file.path)
        sync_directory(self._objects)

    def unmark(self, path: Path, scope: Scope | None) -> None:
        """Note that the mark that `keep` made is to be removed. Uses no disk, so the store's lock may be held."""
        self._keeps.unmark(path, scope)

    def update_scope(self, scope: Scope) -> None:
        """Note that a scope was opened, perhaps again. OutOfSpaceError if the disk refuses the note."""
        try:
            self._keeps.update_scope(scope)
        except OSError as error:
            raise _shortage(self._objects, error) from error

    def forget_scope(self, scope: Scope) -> None:
        """Note that a scope was closed. Uses no disk, so the store's lock may be held."""
        self._keeps.forget_scope(scope)

    def remove_unwanted(self) -> None:
        """Remove what `unmark` and `forget_scope` noted."""
        while True:
            try:
                self._keeps.remove_unwanted()
                return
            except OSError as error:  # the others go
                log.error("an object or a scope that is gone may come back after a restart: %s", error)

    def forget(self, file: DiskFile) -> None:
        """Remove a durable file and all marks that keep it."""
        self._keeps.forget(file.path)
        self.remove(file)

    def discard(self, file: DiskFile, scope: Scope | None) -> None:
        """Remove a durable file whose object was not sealed, and the mark that keeps it."""
        self._keeps.discard(file.path, scope)
        self.remove(file)

    def remove(self, file: DiskFile) -> None:
        """Unlink a file. Processes that map it keep its bytes."""
        file.path.unlink(missing_ok=True)

    def set_aside(self, file: DiskFile) -> None:
        """Move a durable file with wrong content aside, where people can inspect it. OSError comes from the disk."""
        if file.is_durable:
            with contextlib.suppress(FileNotFoundError):
                file.path.rename(file.path.with_suffix(".damaged"))

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, file: DiskFile, start: int, nbytes: int) -> np.ndarray:
        """Return a copy of `nbytes` bytes of the object, from `start` on.

        The node maps no file: a page that the disk cannot give, or that was cut off, would end its process. Raises
        ChecksumError if the file was removed, cut short or replaced; OverloadedError if it cannot be read now.
        """
        try:
            with _opened(file) as fd:
                return _read(fd, file.offset + start, np.empty(nbytes, np.uint8))
        except (ChecksumError, OverloadedError):
            file.is_checked = False  # the next check reads it again, and decides whether the object is lost
            raise

    def check(self, file: DiskFile, nbytes: int, digest: str) -> None:
        """Raise ChecksumError unless the file is whole. The first call also compares the content. Raises
        OverloadedError if the file cannot be read now."""
        with _opened(file) as fd:
            if file.is_checked:
                return
            found = _digest(fd, file.offset, nbytes)
        if found != digest:
            raise ChecksumError(f"{file.path} holds bytes with checksum {found}, {digest} was written: it was damaged")
        file.is_checked = True

    def recover(self) -> Iterator[Recovered]:
        """Yield the durable objects of earlier nodes in this directory, oldest first. Damaged files are moved aside."""
        kept = self._keeps.read()
        for path in sorted(self._objects.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            keepers = kept.get(path.stem, {})
            if not keepers or path.suffix != ".arrow":
                if path.suffix != ".damaged":
                    path.unlink(missing_ok=True)
                continue
            try:
                offset, nbytes, about = read_ipc(path)
                ref = replace(Ref.from_dict(about["ref"]), node=self._node_id)
                if nbytes != ref.nbytes:
                    raise ChecksumError(f"{path} holds {nbytes} bytes, its ref says {ref.nbytes}")
            except (ChecksumError, ValueError, KeyError) as error:
                log.error("a durable object is lost: %s; the file is kept as %s.damaged", error, path)
                path.rename(path.with_suffix(".damaged"))
                continue
            file = replace(_file(path, offset, charge_bytes(nbytes)), is_durable=True)
            scopes = tuple(state for key, state in keepers.items() if key != HELD)
            yield Recovered(ref=ref, digest=about["digest"], file=file, is_held=HELD in keepers, scopes=scopes)

    def _write(self, path: Path, ref: Ref, digest: str, data: np.ndarray) -> DiskFile:
        try:
            offset = write_ipc(path, data, {"ref": ref.to_dict(), "digest": digest})
            return _file(path, offset, charge_bytes(data.nbytes))
        except (OSError, ChecksumError) as error:
            path.unlink(missing_ok=True)
            raise _shortage(path, error) from error


@contextlib.contextmanager
def _opened(file: DiskFile) -> Iterator[int]:
    """Open a file for reading in a `with` block, and raise what the disk says there as an error that names the file."""
    try:
        fd = open_own_file(file.describe())
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise ChecksumError(f"{file.path} was removed, cut short or replaced ({error.strerror})") from error
        raise OverloadedError(
            f"{file.path} cannot be read now ({error.strerror}); nothing is lost: ask again, and see what the disk "
            "and the limits of the node's process say"
        ) from error


def _read(fd: int, at: int, target: np.ndarray) -> np.ndarray:
    """Fill `target` with the bytes of a file from `at` on, and return it. OSError comes from the disk."""
    rest = target.data
    while rest.nbytes:
        count = os.preadv(fd, [rest], at)
        if not count:
            raise OSError(errno.ESTALE, "it ended while it was read")
        rest, at = rest[count:], at + count
    return target


def _digest(fd: int, at: int, nbytes: int) -> str:
    """Return the digest of `nbytes` bytes of a file from `at` on."""
    hashed = blake3(max_threads=blake3.AUTO if nbytes > _BLOCK_BYTES else 1)
    block = np.empty(min(nbytes, _BLOCK_BYTES), np.uint8)
    for start in range(0, nbytes, _BLOCK_BYTES):
        hashed.update(_read(fd, at + start, block[: nbytes - start]).data)
    return digest_of(hashed)


def _file(path: Path, offset: int, charge: int) -> DiskFile:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return DiskFile(path, offset, os.fstat(fd).st_size, charge, False, identity(fd))
    finally:
        os.close(fd)


def _shortage(path: Path, error: Exception) -> OutOfSpaceError:
    return OutOfSpaceError(
        f"{path.parent} does not take another file ({error}); make room on that disk, lower --spill-size, or choose "
        "another --spill"
    )
