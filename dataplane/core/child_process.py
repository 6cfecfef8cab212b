"""Child processes of a node that handle what others made: what they get of its environment, and how they end."""

import logging
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

PASSED_ON = (
    *("PATH", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
)
"""The variables that a child gets as the node has them: what Python and its libraries need to start. Tokens, keys of
clouds and paths of secrets are often in the environment of a node, so it gets no others."""

log = logging.getLogger(__name__)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child of a node that has this one. Its libraries start no threads: there may be a
    child for every core."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def wait_for_killed(process: subprocess.Popen[Any], what: str, timeout_s: float) -> None:
    """Wait until a killed child has ended, at most `timeout_s`; a thread waits for one that takes longer. `what`: what
    messages call it."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        log.error(
            "%s %d was killed and has not ended in %g s (it may wait for a disk or a network file system); it is left "
            "to the system",
            what,
            process.pid,
            timeout_s,
        )
        threading.Thread(target=_wait_for_end, args=(process, what), name=f"killed-{what}", daemon=True).start()


def _wait_for_end(process: subprocess.Popen[Any], what: str) -> None:
    process.wait()
    log.warning("%s %d, which had been killed, has ended", what, process.pid)
