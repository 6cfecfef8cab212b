"""The addresses of other nodes by node id, from the owner's command line or from a directory that only nodes write.

A request never brings an address: a ref names a node id, and this directory gives its address. Each node writes
`ID.json` into the directory when it starts and removes it when it stops. An entry is read again when an id is unknown
or its node does not reply, because addresses may change between runs.
"""

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataplane.core.errors import BadRequestError, MissingObjectError
from dataplane.core.hosts import check_id

_MAX_ENTRY_BYTES = 64 << 10
_ANNOUNCE_S = 5.0

log = logging.getLogger(__name__)


class PeerDirectory:
    """Addresses of other nodes by id. Thread-safe."""

    def __init__(self, node_id: str, static: Mapping[str, str], directory: Path | None) -> None:
        """Open the directory. BadRequestError if an id is not valid, or if other users may write to the directory."""
        self.node_id = node_id
        self._static = _checked(static)
        self._directory = directory
        self._lock = threading.Lock()
        self._found: dict[str, str] = {}
        self._entry = b""
        self._entry_fd = -1
        if directory is not None:
            _check_directory(directory)

    def announce(self, uri: str, host: str, incarnation: str) -> None:
        """Write this node's entry, whole or not at all, and keep it locked. It replaces the entry of a node that was
        killed.

        BadRequestError while another node with this id runs.
        """
        if self._directory is None:
            return
        entry = {"node": self.node_id, "uri": uri, "host": host, "incarnation": incarnation}
        self._entry = json.dumps(entry).encode()
        path = self._directory / f"{self.node_id}.json"
        draft = self._directory / f".{self.node_id}.{incarnation}"
        self._entry_fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._entry_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._entry_fd, self._entry)
            os.fsync(self._entry_fd)
            with _only_one(self._directory, self.node_id):
                _check_is_free(path, self.node_id)
                draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(self._entry_fd)
            self._entry_fd, self._entry = -1, b""
            raise

    def withdraw(self) -> None:
        """Remove this node's entry, unless a later start of the node has written its own."""
        if self._directory is None or not self._entry:
            return
        path = self._directory / f"{self.node_id}.json"
        with contextlib.suppress(OSError):
            if path.read_bytes() == self._entry:
                path.unlink()
        if self._entry_fd >= 0:
            os.close(self._entry_fd)
            self._entry_fd = -1

    def find(self, node_id: str) -> str | None:
        """Return the last known address of a node, or None if it is unknown."""
        told = self._static.get(node_id)
        if told is not None:
            return told
        with self._lock:
            found = self._found.get(node_id)
        return found if found is not None else self.find_again(node_id)

    def find_again(self, node_id: str) -> str | None:
        """Read the directory again and return the node's address. Use this for a node that did not reply at the
        address from `find`."""
        told = self._static.get(node_id)
        if told is not None or self._directory is None:
            return told
        uri = self._read(self._directory, node_id)
        with self._lock:
            if uri is None:
                self._found.pop(node_id, None)
            else:
                self._found[node_id] = uri
        return uri

    def known(self) -> list[str]:
        """Return the ids of all nodes whose address is known now, without this node's own id."""
        ids = set(self._static)
        if self._directory is not None:
            ids |= {path.stem for path in self._directory.glob("*.json") if not path.name.startswith(".")}
        return sorted(ids - {self.node_id})

    def unknown(self, name: str, node_id: str) -> MissingObjectError:
        """Return the error for an object whose home node cannot be found."""
        known = ", ".join(self.known()) or "none"
        return MissingObjectError(
            f"{name} is not on node {self.node_id}, and its home {node_id[:80]!r} is not known here (known: {known}). "
            "If that node has ended, the object ended with it: store such objects with durable=True on a node with "
            f"--spill, which keeps them. If it runs, start this node with --peer {node_id[:80]}=grpc://HOST:PORT, or "
            "both with the same --directory"
        )

    def _read(self, directory: Path, node_id: str) -> str | None:
        try:
            check_id(node_id, "node id")
            entry = _read_entry(directory / f"{node_id}.json")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the entry of node %r in %s is not used: %s", node_id[:80], directory, error)
            return None
        if entry.get("node") != node_id or not isinstance(entry.get("uri"), str):
            log.warning("the entry %s.json in %s names another node, or no address", node_id, directory)
            return None
        return str(entry["uri"])


def _checked(static: Mapping[str, str]) -> dict[str, str]:
    for node_id, uri in static.items():
        try:
            check_id(node_id, "peer id")
        except ValueError as error:
            raise BadRequestError(f"{error}; write --peer ID=URI") from error
        if not uri.startswith("grpc"):
            raise BadRequestError(f"the address of peer {node_id} is {uri!r}; wanted grpc://HOST:PORT")
    return dict(static)


def _check_directory(directory: Path) -> None:
    """Check that only this user may write here, because an entry can direct this node to any address."""
    try:
        found = directory.stat()
    except OSError as error:
        raise BadRequestError(f"--directory {directory}: {error.strerror}; make it first, with mode 0700") from error
    if not stat.S_ISDIR(found.st_mode):
        raise BadRequestError(f"--directory {directory} is no folder; make one with mode 0700")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise BadRequestError(
            f"--directory {directory} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; "
            f"wanted user {os.geteuid()} and no other user who may write: chmod 700 it, or choose another"
        )


@contextlib.contextmanager
def _only_one(directory: Path, node_id: str) -> Iterator[None]:
    """Wait until this is the only node that reads and writes the directory. Each other node uses it only for a
    moment."""
    deadline = time.monotonic() + _ANNOUNCE_S
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BadRequestError(
                        f"--directory {directory} was locked for {_ANNOUNCE_S:g} s when node {node_id} came "
                        "it; see which process holds it"
                    ) from error
                time.sleep(0.02)
            except OSError as error:  # some network file systems cannot lock folders
                log.info("%s cannot be locked: %s", directory, error)
                break
        yield
    finally:
        os.close(fd)


def _check_is_free(path: Path, node_id: str) -> None:
    """Raise if the existing entry belongs to a running node, which keeps its entry locked."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BadRequestError(
            f"a node with the id {node_id} runs already and has its entry in {path.parent}; choose another --node-id, "
            "or stop that node first"
        ) from error
    finally:
        os.close(fd)


def _read_entry(path: Path) -> Mapping[str, Any]:
    """Return an entry that this user wrote and that no other user may write."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError("it is no plain file that only this user may write")
        entry = json.loads(file.read(_MAX_ENTRY_BYTES))
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    return entry
