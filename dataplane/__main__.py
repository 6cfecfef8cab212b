"""`python -m dataplane serve | put | get | release | stat | top | ingest | quarantine`."""

import os
import sys


def run() -> int:
    """The command line's exit code; Ctrl-C counts from here on, also while its modules are being loaded."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said once, by us; read when gRPC is loaded
    try:
        from dataplane.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
