"""The process that keeps what a run has on one of its other hosts: folders, a node of the data plane, a scope there.

    python -m yatt_mm.hosts.host_process        (`agent.py` starts it, and writes an order to its standard input)

It removes all of that and ends when its standard input closes: so it does where Ray has killed its agent, too. It
prints lines of JSON: what there is when it is ready, then each change of its node.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dataplane.client.embedded import EmbeddedNode
from dataplane.core.errors import DataPlaneError
from yatt_mm.hosts.orders import NodeSettings
from yatt_mm.hosts.run_node import keep_log, open_run_scope, start_own_node
from yatt_mm.hosts.scratch import Scratch, same_scratch_folders

POLL_S = 0.2


def main() -> int:
    """Keep what the order names until the standard input closes."""
    order = json.loads(sys.stdin.buffer.readline())
    if os.fork():  # Ray kills the children of an actor with it
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with ExitStack() as stack:
            scratch = Scratch(files=Path(order["files"]), weights=Path(order["weights"]))
            stack.enter_context(same_scratch_folders(scratch))
            settings = NodeSettings(**order["node"])
            stack.callback(keep_log, scratch.files, Path(order["log_dir"]), f"node-{order['number']}.log")
            embedded = start_own_node(stack, settings)
            open_run_scope(stack, embedded.uri, order["scope"], embedded)
            _tell(uri=embedded.uri)
            _watch(embedded)
    except FileExistsError as error:
        _tell(
            error=f"{error.filename} is there already: it has the same files as another host of the run, so it is none"
        )
        return 1
    except (OSError, DataPlaneError) as error:
        _tell(error=str(error))
        return 1
    return 0


def _watch(node: EmbeddedNode) -> None:
    """Tell what changes, until the standard input closes."""
    told = (0, "")
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        failure = str(node.failure or "")
        if (node.num_restarts, failure) != told:
            told = node.num_restarts, failure
            _tell(num_restarts=node.num_restarts, last_restart_s=node.last_restart_s, failure=failure)


def _tell(**news: Any) -> None:
    try:
        print(json.dumps(news), flush=True)
    except BrokenPipeError:  # the agent is gone, which the standard input says too
        sys.stdout = None  # nothing more is written


if __name__ == "__main__":
    sys.exit(main())
