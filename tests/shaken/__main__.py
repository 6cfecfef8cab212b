"""Runs the quick half of the tests again and again on busy cores, with threads that are late at random.

    python -m tests.shaken --runs 50 --log shaken.jsonl     # two at a time: about three hours on two cores

Each run is the load of the one beside it. A run that is red names its tests. Runs are appended to the log, so that
fifty of them may be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.import_graph import light_tests

ROOT = Path(__file__).parents[2]
DELAYS = Path(__file__).parent / "delays"
BESIDE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
LONGEST_S = 1800.0
"""The time in seconds after which a run is ended and counts as red."""

QUICK = "not (alone or elsewhere or torch)"
"""The tests of `make unit`, by their marks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if a run was red."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.shaken", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50, help="how many runs (50)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first run's delays; each run adds one (0)")
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at a time (2)")
    parser.add_argument("--log", type=Path, help="a file to which a line is appended for each run")
    options = parser.parse_args(arguments)
    num_red = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(shaken_run, seed) for seed in range(options.seed, options.seed + options.runs)]
        for run in as_completed(runs):
            record = run.result()
            num_red += bool(record["red"])
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(json.dumps(record) + "\n")
            about = f"seed {record['seed']}: {record['seconds']:.0f} s, {record['said']}"
            print(about, *record["red"], sep="\n  ", flush=True)
    print(f"{num_red} of {options.runs} runs were red")
    return int(num_red > 0)


def shaken_run(seed: int) -> dict[str, Any]:
    """Run the quick half once. Return its seconds, pytest's last line, and the tests that failed; and the whole
    output if one did."""
    path = os.pathsep.join([str(DELAYS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "YATT_TEST_DELAYS": str(seed)}
    tests = [str(file.relative_to(ROOT)) for file in light_tests()]
    command = [sys.executable, "-m", "pytest", "-m", QUICK, "-p", "no:cacheprovider", *BESIDE, *tests]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
        lines, status, errors = done.stdout.splitlines(), done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        lines, status, errors = (late.stdout or b"").decode().splitlines(), -1, f"not ended after {LONGEST_S:g} s"
    red = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if status and not red:
        red = [f"pytest ended with status {status}: {errors[-500:]}"]
    seconds, said = round(time.monotonic() - started, 1), (lines or [""])[-1]
    return {"seed": seed, "seconds": seconds, "said": said, "red": red, "output": lines if red else []}


if __name__ == "__main__":
    sys.exit(main())
