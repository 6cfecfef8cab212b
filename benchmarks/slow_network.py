"""Measures a step of a run over two hosts on a fast network, on a slow one, and on one with a long way.

    python -m examples.digits.prepare
    python benchmarks/slow_network.py [--json] [--steps 4] [--mbit 100] [--delay-ms 10] [key=value ...]

The hosts are namespaces of this machine (`benchmarks.common.hosts`; needs root), each with one device and a replica of
the model. The slow network has a limit of Linux's `tbf` on what each host sends; the long way is a relay, which
carries every packet later. Seconds are medians of all steps but the first.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common.cluster import cluster_of
from benchmarks.common.hosts import why_not_allowed
from benchmarks.common.runs import parser, show

CONFIG, DATA = "configs/digits_cpu.yaml", Path("examples/digits/data")
SECONDS = ("step", "rollout", "train", "publish")
KINDS = ("gradients", "weights", "media", "rollouts", "control")


def main() -> None:
    """Run on all networks, measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--mbit", type=int, default=100, help="what a host of the slow network sends per second")
    arguments.add_argument("--delay-ms", type=float, default=10.0, help="the way of the long network")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    if why := why_not_allowed():
        sys.exit(f"error: {why}")
    networks: dict[str, dict[str, Any]] = {
        "bridge": {},
        f"{options.mbit} Mbit/s": {"mbit_per_s": options.mbit},
        f"{options.delay_ms:g} ms": {"delay_s": options.delay_ms / 1e3},
    }
    with tempfile.TemporaryDirectory(prefix="yatt-bench-", dir="/var/tmp") as name:  # hosts have a /tmp of their own
        folder = Path(name)
        shutil.copytree(DATA / "model", folder / "model")
        for shard in DATA.glob("*.tar"):
            shutil.copy(shard, folder)
        rows = [
            {"network": network, **measure(options, folder / str(number), **settings)}
            for number, (network, settings) in enumerate(networks.items())
        ]
    show("seconds and kilobytes of a step over two hosts", rows, as_json=options.json)


def measure(options: Any, folder: Path, *, mbit_per_s: int = 0, delay_s: float = 0.0) -> dict[str, float]:
    """Run once, and return the seconds and bytes of a step. `folder`: one that does not exist yet; beside it are the
    model and the data."""
    folder.mkdir()
    overrides = [
        f"run.dir={folder}",
        "run.name=run",
        f"model.path={folder.parent / 'model'}",
        *(f"data.{name}={folder.parent}/{name}-*.tar" for name in ("train", "eval")),
        f"train.steps={options.steps}",
        "eval.every=0",
        "checkpoint.every=0",
        *options.overrides,
    ]
    with cluster_of(2, folder, delay_s=delay_s) as cluster:
        for number in (0, 1):
            cluster.hosts[number].limit(mbit_per_s)
            cluster.start_ray(number)
        done = cluster.run([CONFIG, *overrides])
    if done.status:
        sys.exit(f"error: the run ended with {done.status}:\n{done.output}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return dict(_row([record for line in lines if (record := json.loads(line))["step"] > 1]))


def _row(records: list[dict[str, float]]) -> Iterable[tuple[str, float]]:
    for name in SECONDS:
        yield name, median(record[f"time/{name}_s"] for record in records)
    for kind in KINDS:
        yield f"{kind} kB", median(record[f"hosts/{kind}_bytes"] for record in records) / 1e3


if __name__ == "__main__":
    main()
