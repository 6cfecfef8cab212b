"""Host ids and node ids: which machine this is, and which ids are allowed. It uses only the standard library.

Two processes share memory only if their host ids are equal and the segment's file opens; otherwise objects are copied
over Flight. Containers of one machine have the same host id, so only opening the file shows if they share `/dev/shm`.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

DEFAULT_PORT = 8815
"""The port of a node that is started without `--port`."""
HOST_ID_VARIABLE = "DATAPLANE_HOST_ID"
"""The environment variable that overrides the host id of a process."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_host_id() -> str:
    """Return the id of this machine, which changes at each boot. The environment variable `DATAPLANE_HOST_ID` overrides
    the id for a process."""
    told = os.environ.get(HOST_ID_VARIABLE, "")
    if told:
        return check_id(told, HOST_ID_VARIABLE)
    try:
        boot = _BOOT_ID.read_bytes().strip()
    except OSError:
        boot = os.uname().nodename.encode()
    return hashlib.blake2b(boot, digest_size=8, person=b"dataplane-host").hexdigest()


def new_node_id() -> str:
    """Return a random id for a node that was started without an id."""
    return secrets.token_hex(4)


def check_id(text: str, what: str) -> str:
    """Return `text` if it is a valid id of a node or a machine. Raises ValueError, with `what` in the message, if
    not."""
    if not _ID.fullmatch(text):
        raise ValueError(
            f"{what} is {text[:80]!r}; wanted 1 to 64 letters, digits, '.', '_' or '-' beginning with a letter or digit"
        )
    return text
