"""Seconds per step of one run in three placements: in turns, divided for good, divided as the placement policy moves
devices.

The judge is slow on purpose: it writes `--judge-tokens` tokens on every response, whose first digit is its score. What
is learned is worth nothing; what is measured is where the time goes. Every device is pinned to a core of its own.

    python -m benchmarks.divided_devices [--json] [--steps 8] [--judge-tokens 48] [key=value ...]

Prepare first: python -m examples.judge.prepare
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common.runs import parser, run_and_read, show

NUM_WARMUP_STEPS = 2
PLACEMENTS = {
    "full": ["placement.mode=full_colocation"],
    "partial_static": ["placement.mode=partial_colocation", "placement.dynamic=false"],
    "partial_dynamic": ["placement.mode=partial_colocation", "placement.decide_every_s=0.05"],
}


def main() -> None:
    """Run all placements, measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--config", default="configs/judge_full_cpu.yaml")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--judge-tokens", type=int, default=48)
    arguments.add_argument("--dir", default="runs", help="folder of the runs; timelines and decisions are there")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    rows = []
    for name, placement in PLACEMENTS.items():
        run_name = f"divided_{name}"
        overrides = [
            f"run.name={run_name}",
            f"run.dir={options.dir}",
            f"train.steps={options.steps}",
            "eval.every=0",
            "checkpoint.every=0",
            "placement.pin_cores=true",
            "rollout.max_groups_per_engine=2",
            "reward.judges.digits.verdict=regex",
            "reward.judges.digits.pattern=([0-9])",
            "reward.judges.digits.scale=9",
            "reward.judges.digits.temperature=1",
            "reward.judges.digits.max_attempts=1",
            f"reward.judges.digits.max_tokens={options.judge_tokens}",
            "reward.judges.digits.max_groups_per_engine=2",
        ]
        records = run_and_read(options.config, [*overrides, *placement, *options.overrides])
        steps = [record for record in records if record["step"] > NUM_WARMUP_STEPS]
        rows.append({"path": name, **_measure(steps), "splits": _splits(Path(options.dir) / run_name)})
    show("Where judges work", rows, as_json=options.json)


def _measure(steps: list[dict[str, Any]]) -> dict[str, Any]:
    generation_s = [
        record["time/rollout_s"] + (0.0 if "placement/num_moves" in record else record["time/genrm_s"])
        for record in steps
    ]
    return {
        "step_s": mean(record["time/step_s"] for record in steps),
        "generation_s": mean(generation_s),
        "num_moves": sum(record.get("placement/num_moves", 0) for record in steps),
        "rollout_devices": mean(record["placement/rollout_devices"] for record in steps),
    }


def _splits(run_dir: Path) -> str:
    """Return the divisions of devices that occurred, and how often each did."""
    decisions = [json.loads(line) for line in (run_dir / "placement.jsonl").read_text().splitlines()]
    splits = [decision["split"] for decision in decisions]
    return ", ".join(f"{split} x{splits.count(split)}" for split in dict.fromkeys(splits))


if __name__ == "__main__":
    main()
