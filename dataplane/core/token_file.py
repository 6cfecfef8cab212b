"""Token files: the bearer tokens that a node accepts, one per line, each with its right and its expiry.

A line is `TOKEN [read|write|admin] [EXPIRY]`. Without a right the token is admin; without an expiry it is valid for
ever. `#` begins a comment. A node keeps only the digests of tokens, never writes a token anywhere, and compares a
client's token with all of them in constant time.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dataplane.core.errors import BadRequestError, UnauthenticatedError
from dataplane.core.rights import RIGHTS, Right

MIN_TOKEN_CHARS = 16
"""The minimum length of an accepted token, in characters."""
_TOKEN = re.compile(r"[\x21-\x7e]+")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A line of a token file, with the token's digest in place of the token."""

    digest: bytes
    """The SHA-256 digest of the token: 32 bytes."""
    right: Right
    expires: datetime | None
    """The moment, with a time zone, from which the token is refused; None if the token never expires."""


class TokenFile:
    """The tokens that a node accepts. The file is read again when it changes. It is thread-safe.

    If the changed file cannot be used (bad line, wrong permissions, missing), the node logs the error and keeps the
    tokens that it had; their expiries still apply.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = _stamp(path)
        self._tokens = read_tokens(path)

    def right_of(self, shown: str) -> Right:
        """Return the right of the token that a client sent. Raises UnauthenticatedError if the token is empty, unknown
        or expired."""
        self._read_again()
        if not shown:
            raise UnauthenticatedError(
                "this node wants a token: set DATAPLANE_TOKEN_FILE (or DATAPLANE_TOKEN), or give --token-file"
            )
        digest, found = _digest(shown), None
        for token in self._tokens:  # compare with all, even after a match: the time must not tell which one matched
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise UnauthenticatedError("this node does not know the token; wanted one from its --token-file")
        if found.expires is not None and found.expires <= datetime.now(UTC):
            raise UnauthenticatedError(f"the token expired at {found.expires.isoformat()}; get a new one")
        return found.right

    def _read_again(self) -> None:
        """Read the file again if it changed since the last check."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        with self._lock:
            if stamp == self._seen:
                return
            try:
                self._tokens = read_tokens(self._path)
                log.warning("the token file %s was read again: %d token(s)", self._path, len(self._tokens))
            except BadRequestError as error:
                log.error("the node keeps the tokens that it had before: %s", error)
            self._seen = stamp


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Return the tokens of a file. Raises BadRequestError that names the wrong line, but never quotes its text."""
    return tuple(token for _, token in _read(path))


def first_token(path: Path) -> str:
    """Return the first token of a file, which is the token that a client sends."""
    return _read(path)[0][0]


def _read(path: Path) -> list[tuple[str, Token]]:
    """Return a pair for each line of a file with a token: the token as it is written there, and the parsed line."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:
        raise BadRequestError(f"the token file {path} cannot be read ({error}); give another --token-file") from error
    if mode & 0o077:
        raise BadRequestError(f"the token file {path} has mode {mode:04o}; others may read it: chmod 600 {path}")
    tokens = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            tokens.append((words[0], _parse(words, f"{path} line {number}")))
    if not tokens:
        raise BadRequestError(f"the token file {path} has no token; wanted lines of TOKEN [read|write|admin] [EXPIRY]")
    return tokens


def _parse(words: list[str], where: str) -> Token:
    """Return the token that the words of one line describe. `where` names the line in errors."""
    token, rest = words[0], words[1:]
    if len(token) < MIN_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        raise BadRequestError(
            f"{where}: a token of {len(token)} characters; wanted at least {MIN_TOKEN_CHARS} printable ASCII "
            "characters, for example from: openssl rand -hex 24"
        )
    right = Right.ADMIN
    if rest and rest[0] in RIGHTS:
        right = RIGHTS[rest.pop(0)]
    expires = _parse_expiry(rest.pop(0), where) if rest else None
    if rest:
        raise BadRequestError(f"{where}: {len(words)} words; wanted TOKEN [read|write|admin] [EXPIRY]")
    return Token(digest=_digest(token), right=right, expires=expires)


def _parse_expiry(text: str, where: str) -> datetime:
    """Return the moment that an ISO 8601 date and time means; without a time zone it is UTC. `where` names the line in
    errors."""
    try:
        expires = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadRequestError(
            f"{where}: a word after the token is neither read, write or admin nor an expiry such as 2030-01-31T12:00Z"
        ) from error
    return expires if expires.tzinfo else expires.replace(tzinfo=UTC)


def _digest(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    """Return (inode, size, mtime, ctime) of a file, of which at least one differs after a change; None if the file
    cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
