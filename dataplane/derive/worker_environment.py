"""The environment of a decode worker: what Python and its libraries need to start, and nothing else of the node's.

Tokens, keys of clouds and paths of secrets are often in the environment of a node. A worker reads media that anybody
may have made, so it gets none of them.
"""

from collections.abc import Mapping

PASSED_ON = (
    *("PATH", "HOME", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
)
"""The variables that a worker gets as the node has them."""


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker of a node that has this one. Its libraries start no threads: there is a
    worker for every core."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
