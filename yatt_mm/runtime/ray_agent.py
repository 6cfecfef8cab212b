"""Runs Ray's agent of a node as if Ray were installed without its web page: it serves nothing, and listens nowhere.

Its arguments are the agent's file and the arguments of that. The agent that Ray would start loads what serves pages,
jobs and counters, which no run has a use for, and Ray's start waits for it. It is started as a file, not as a module of
this package, which it need not import.
"""

import runpy
import sys
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    cast(dict[str, Any], sys.modules)["aiohttp_cors"] = None  # Ray takes this for an installation without its page
    sys.argv = [*sys.argv[1:], "--minimal"]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does for the agent's file
    runpy.run_path(sys.argv[0], run_name="__main__")
