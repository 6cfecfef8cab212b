"""One-time keys for byte connections. A client that asked for a key over Flight may open one connection to the byte
port."""

import secrets
import threading
import time
from typing import Any

from dataplane.core.byte_socket import KEY_BYTES
from dataplane.core.errors import OverloadedError
from dataplane.server.auth import Caller

KEY_S = 10.0
"""The time in seconds after which a key expires."""
MAX_KEYS = 1024


class ByteKeys:
    """The keys that were given out and not used yet, each with its caller. Thread-safe."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._lock = threading.Lock()
        self._keys: dict[bytes, tuple[float, Caller]] = {}

    def give(self, caller: Caller) -> str:
        """Return a new key, in hex. OverloadedError if too many were asked for at once."""
        now = time.monotonic()
        with self._lock:
            while self._keys and next(iter(self._keys.values()))[0] < now:
                del self._keys[next(iter(self._keys))]  # keys expire in the order of the table
            if len(self._keys) >= MAX_KEYS:
                raise OverloadedError(
                    f"{MAX_KEYS} keys for byte connections were asked for in {KEY_S:g} s and not used; try again later"
                )
            key = secrets.token_bytes(KEY_BYTES)
            self._keys[key] = (now + KEY_S, caller)
            return key.hex()

    def offer(self, caller: Caller) -> dict[str, Any]:
        """Return the answer of the action `bytes`: the port, and a key that opens one connection there until it
        expires."""
        return {"port": self.port, "key": self.give(caller)}

    def take(self, key: bytes) -> Caller | None:
        """Return the caller of a key, and remove the key. None if it is unknown or has expired."""
        with self._lock:
            until, caller = self._keys.pop(key, (0.0, None))
        return caller if time.monotonic() < until else None
