"""Measures rollouts per second, and how the time of a training step is spent.

`overhead` is the part of the step that is neither rollout nor training nor publishing: drawing prompts, making patches,
planning, meeting, reporting (target: at most 10 % of the step).

    python -m benchmarks.end_to_end [--json] [--config configs/digits_cpu.yaml] [--steps 12] [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common.runs import parser, run_and_read, show

NUM_WARMUP_STEPS = 2


def main() -> None:
    """Run, measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--config", default="configs/digits_cpu.yaml")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    fixed = ["run.name=end_to_end", f"train.steps={options.steps}", "eval.every=0", "checkpoint.every=0"]
    records = run_and_read(options.config, [*fixed, *options.overrides])
    steps = [record for record in records if NUM_WARMUP_STEPS < record["step"] < options.steps]
    rows = measure(steps)
    show("Where a step's time goes", rows, as_json=options.json)


def measure(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of means over the steps without evaluation or checkpoint."""
    step_s = mean(record["time/step_s"] for record in steps)
    parts = {name: mean(record[f"time/{name}_s"] for record in steps) for name in ("rollout", "train", "publish")}
    parts["overhead"] = step_s - sum(parts.values())
    num_rollouts = mean(record["rollout/num_tokens"] / record["rollout/length_mean"] for record in steps)
    num_bytes = int(mean(record["dataplane/resolved_bytes"] for record in steps))
    rows: list[dict[str, Any]] = [
        {"path": "step", "bytes": num_bytes, "seconds": step_s, "share": 1.0, "rollouts_per_s": num_rollouts / step_s}
    ]
    for name, seconds in parts.items():
        row = {"path": name, "bytes": num_bytes, "seconds": seconds, "share": seconds / step_s}
        if name == "rollout":
            row["rollouts_per_s"] = num_rollouts / seconds
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
