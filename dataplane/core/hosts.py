"""Which machine this is, and which names nodes and machines may have. Standard library only.

Two processes share memory only where their host ids are equal and the segment's file opens; everyone else copies over
Flight. Containers of one machine have one boot id: whether they see the same `/dev/shm` is told by the file.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

DEFAULT_PORT = 8815
"""The port of a node that is started without `--port`."""
HOST_ID_VARIABLE = "DATAPLANE_HOST_ID"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_host_id() -> str:
    """The id of this machine since it booted; `DATAPLANE_HOST_ID` overrides it for a process."""
    told = os.environ.get(HOST_ID_VARIABLE, "")
    if told:
        return check_id(told, HOST_ID_VARIABLE)
    try:
        boot = _BOOT_ID.read_bytes().strip()
    except OSError:
        boot = os.uname().nodename.encode()
    return hashlib.blake2b(boot, digest_size=8, person=b"dataplane-host").hexdigest()


def new_node_id() -> str:
    """An id for a node that was given none."""
    return secrets.token_hex(4)


def check_id(text: str, what: str) -> str:
    """`text` if a node or a machine may have it as its id; ValueError says what was found and wanted."""
    if not _ID.fullmatch(text):
        raise ValueError(
            f"{what} is {text[:80]!r}; wanted 1 to 64 letters, digits, '.', '_' or '-' that begin with no sign"
        )
    return text
