"""Runs Ray's agent of a node as if Ray were installed without its web page: it serves nothing, and listens nowhere.

Its arguments are the agent's file and the arguments of that. The agent that Ray would start loads what serves pages,
jobs and counters, which no run has a use for, and Ray's start waits for it.
"""

import runpy
import sys
from typing import Any, cast

if __name__ == "__main__":
    cast(dict[str, Any], sys.modules)["aiohttp_cors"] = None  # Ray takes this for an installation without its page
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
