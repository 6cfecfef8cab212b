"""The start of `python -m dataplane serve | put | get | release | stat | top | ingest | quarantine`."""

import os
import sys


def run() -> int:
    """Run the command line and return its exit code: 130 after Ctrl-C, even while modules are still loading."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report errors ourselves; gRPC reads this when it loads
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads keep processors busy, and have no work here
    try:
        from dataplane.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
