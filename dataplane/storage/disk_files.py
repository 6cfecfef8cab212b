"""The disk tier of a node: files of spilled objects, which end with the node, and of durable ones, which survive it.

    DIR/lock                    held for as long as a node uses DIR
    DIR/spill/*.arrow           removed when a node starts
    DIR/durable/objects/*.arrow an object each
    DIR/durable/keeps/          who keeps which of them (keeps.py)

A durable object is alive for as long as something keeps it: what nothing keeps is removed at the next start. Moves no
budget and takes no lock but its own: what is spilled, and when, is the store's business.
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

from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, ChecksumError, OutOfSpaceError, OverloadedError
from dataplane.core.refs import Ref
from dataplane.core.shared_files import identity, map_file
from dataplane.storage.group_commit import GroupCommit, sync_directory
from dataplane.storage.ipc_file import OVERHEAD_BYTES, read_ipc, write_ipc
from dataplane.storage.retention_marks import HELD, RetentionMarks
from dataplane.storage.scopes import Scope

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file that holds one object."""

    path: Path
    offset: int
    nbytes: int
    """Of the whole file."""
    charge_bytes: int
    """What it takes of the spill budget."""
    is_durable: bool
    identity: Mapping[str, int]
    is_checked: bool = False
    """Its content was compared with its digest."""

    def describe(self) -> dict[str, Any]:
        """What readers need to map it, and to be sure that it is this one."""
        return {"path": str(self.path), "nbytes": self.nbytes, **self.identity}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A durable object of an earlier node."""

    ref: Ref
    digest: str
    file: DiskFile
    is_held: bool
    scopes: tuple[Mapping[str, Any], ...] = field(default=())
    """name, quota_bytes, keep, owners of each scope that it was in."""


def charge_bytes(nbytes: int) -> int:
    """What an object of `nbytes` takes of the spill budget."""
    return -(-nbytes // 4096) * 4096 + OVERHEAD_BYTES


class DiskFiles:
    """The files under one directory, which it locks. Thread-safe."""

    def __init__(self, directory: Path, budget_bytes: int, node_id: str) -> None:
        """Take the directory. BadRequestError if another node has it, OutOfSpaceError if it cannot be written."""
        self.budget_bytes = budget_bytes
        self._node_id = node_id
        self._spill, self._objects = directory / "spill", directory / "durable" / "objects"
        self._commits = GroupCommit()
        try:
            self._keeps = RetentionMarks(directory / "durable" / "keeps", self._objects)
            self._objects.mkdir(exist_ok=True)
            for folder in (directory / "durable" / "keeps", directory / "durable", directory):
                sync_directory(folder)
            with contextlib.suppress(PermissionError):  # one that may be passed through but not read is older than us
                sync_directory(directory.parent)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            directory.chmod(0o700)
        except OSError as error:
            raise OutOfSpaceError(
                f"--spill {directory} cannot be written ({error.strerror}); choose another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise BadRequestError(
                f"--spill {directory} is used by {owner or 'another node'}; give every node a directory of its own"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"node {node_id}, process {os.getpid()}".encode(), 0)
        shutil.rmtree(self._spill, ignore_errors=True)
        self._spill.mkdir(exist_ok=True)

    def close(self) -> None:
        """Remove what is not durable and give the directory back."""
        shutil.rmtree(self._spill, ignore_errors=True)
        os.close(self._lock)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, ref: Ref, digest: str, data: np.ndarray) -> DiskFile:
        """A file that ends with this node. OutOfSpaceError where the disk does not take it."""
        return self._write(self._spill / f"{secrets.token_hex(8)}.arrow", ref, digest, data)

    def write_durable(self, ref: Ref, digest: str, data: np.ndarray, scope: Scope | None) -> DiskFile:
        """A file that survives this node, kept by `scope` or held; it is on the disk when this returns.

        Waits for: the sync that it shares with others who write at the same time.
        """
        key = blake3(ref.name.encode()).hexdigest()[:24]
        path = self._objects / f"{key}-{secrets.token_hex(8)}.arrow"  # no two writers share a file
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        file = self._write(temporary, ref, digest, data)
        try:
            self._commits.commit(temporary, path, [self.keep(path, scope), self._objects])
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            self.discard(replace(file, path=path), scope)
            if isinstance(error, OSError):
                raise _shortage(path, error) from error
            raise
        return replace(file, path=path, is_durable=True)

    def keep(self, path: Path, scope: Scope | None) -> Path:
        """A durable file is kept by `scope`, or held. Returns the folder to sync. OSError as the disk gives it."""
        return self._keeps.keep(path, scope)

    def let_go(self, path: Path, scope: Scope | None) -> None:
        """The reverse of `keep`."""
        self._keeps.let_go(path, scope)

    def update_scope(self, scope: Scope) -> None:
        """A scope was opened, perhaps once more. OutOfSpaceError where the disk does not note it."""
        try:
            self._keeps.update_scope(scope)
        except OSError as error:
            raise _shortage(self._objects, error) from error

    def forget_scope(self, scope: Scope) -> None:
        """A scope was closed."""
        try:
            self._keeps.forget_scope(scope)
        except OSError as error:
            log.error("scope %r may come back after a restart: %s", scope.name, error)

    def forget(self, file: DiskFile) -> None:
        """A durable file goes, whoever keeps it."""
        self._keeps.forget(file.path)
        self.remove(file)

    def discard(self, file: DiskFile, scope: Scope | None) -> None:
        """A durable file that was written for nothing goes, with what kept it."""
        self.let_go(file.path, scope)
        self.remove(file)

    def remove(self, file: DiskFile) -> None:
        """Unlink a file; who maps it keeps its bytes."""
        file.path.unlink(missing_ok=True)

    def set_aside(self, file: DiskFile) -> None:
        """A durable file that is not what was written stays for people to look at. OSError as the disk gives it."""
        if file.is_durable:
            with contextlib.suppress(FileNotFoundError):
                file.path.rename(file.path.with_suffix(".damaged"))

    # -- reading ---------------------------------------------------------------------------------------------------

    def map(self, file: DiskFile, nbytes: int) -> np.ndarray:
        """The object's bytes, mapped read-only; they cost no descriptor.

        ChecksumError if the file is not what was written; OverloadedError if that cannot be told now.
        """
        try:
            return np.asarray(map_file(file.describe(), is_own=True))[file.offset : file.offset + nbytes]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise ChecksumError(f"{file.path} was removed, cut short or replaced ({error.strerror})") from error
            raise OverloadedError(
                f"{file.path} cannot be read now ({error.strerror}); nothing is lost: ask again, and see what the disk "
                "and the limits of the node's process say"
            ) from error

    def check(self, file: DiskFile, nbytes: int, digest: str) -> None:
        """Raise ChecksumError unless the file is whole; its content is compared the first time."""
        data = self.map(file, nbytes)
        if file.is_checked:
            return
        found = content_digest(data)
        if found != digest:
            raise ChecksumError(f"{file.path} holds bytes with checksum {found}, {digest} was written: it was damaged")
        file.is_checked = True

    def recover(self) -> Iterator[Recovered]:
        """The durable objects of the nodes that had this directory, oldest first; what is damaged is set aside."""
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
