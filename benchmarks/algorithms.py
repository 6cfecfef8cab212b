"""Trains the digits with every algorithm, from the same start and with the same prompts, and with the opposite reward.

An algorithm that works reads the digits after the first run, and has forgotten them after the second. The table shows
both accuracies, the seconds of a step, and how well a critic predicts rewards in the second step and in the last.

    python -m benchmarks.algorithms [--json] [--steps 25] [--only NAME ...] [key=value ...]

Their configs are those of configs/algorithms.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common.runs import parser, run_and_read, show
from yatt_mm.algorithms.table import ALGORITHMS

FLOOR, CEILING = 0.90, 0.45
"""The accuracy that an algorithm must reach, and the one that it must not exceed with the opposite reward."""
OPPOSITE = f"{Path(__file__).resolve().parent / 'common' / 'opposite_reward.py'}:opposite"
EXPLAINED = "critic/explained_variance"
CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "algorithms"


def main() -> None:
    """Run every algorithm twice and print the table. Exit status 1: one of them did not learn, or did not forget."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=25, help="training steps of each run (%(default)s)")
    arguments.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), metavar="NAME")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    rows = []
    for name in options.only:
        fixed = [
            f"train.steps={options.steps}",
            f"eval.every={options.steps}",
            "checkpoint.every=0",
            "rollouts.keep=none",
            *options.overrides,
        ]
        config = str(CONFIGS / f"{name}.yaml")
        learns = run_and_read(config, fixed)
        forgets = run_and_read(config, [*fixed, f"reward.function={OPPOSITE}"])
        before, after, opposed = (
            records[at]["eval/accuracy"] for records, at in ((learns, 0), (learns, -1), (forgets, -1))
        )
        rows.append(
            {
                "algorithm": name,
                "before": before,
                "after": after,
                "after the opposite reward": opposed,
                "s per step": statistics.median(record["time/step_s"] for record in learns[2:]),
                "explained": " to ".join(f"{at[EXPLAINED]:.2f}" for at in (learns[2], learns[-1]) if EXPLAINED in at),
                "learns": after > FLOOR and opposed < CEILING,
            }
        )
    show(f"Digits, {options.steps} steps", rows, as_json=options.json)
    sys.exit(0 if all(row["learns"] for row in rows) else 1)


if __name__ == "__main__":
    main()
