"""`python -m dataplane serve | put | get | release | stat | ingest`."""

import sys

from dataplane.cli import main

if __name__ == "__main__":
    sys.exit(main())
