"""Finds the ranges in which full and partial colocation are faster, and in which they are slower, with the simulator.

One parameter at a time is varied from its value in configs/simulate/yatt_paper.yaml. `saving_full` is the part of a
step that full colocation saves against the external GenRM at its best split (negative: it loses time). `saving_partial`
is the part of the generation phase that the dynamic split saves against full colocation.

    python -m benchmarks.simulate_ranges                      # all parameters
    python -m benchmarks.simulate_ranges --only verdict,wake  # some of them
    python -m benchmarks.simulate_ranges --json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.progress import track

from benchmarks.common.runs import parser, show
from yatt_mm.simulator.config import load_simulation
from yatt_mm.simulator.layouts import best_external, best_partial_static
from yatt_mm.simulator.turn_layouts import full, partial_dynamic

BASE = "configs/simulate/yatt_paper.yaml"
SWEEPS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "verdicts": [(str(n), (f"workload.verdicts_per_response={n}",)) for n in (1, 2, 4, 8, 16)],
    "verdict": [(f"{n} tokens", (f"workload.verdict.median={n}",)) for n in (10, 50, 250, 450)],
    "tail": [(f"{100 * frac:g} %", (f"workload.response.tail_frac={frac}",)) for frac in (0.001, 0.05, 0.2)],
    "wake": [
        (f"{s} s", (f"rollout.wake_s={s}", f"genrm.wake_s={s}", f"rollout.sleep_s={s}", f"genrm.sleep_s={s}"))
        for s in (0, 3, 10, 30)
    ],
    "devices": [
        (str(n), (f"devices.num={n}", f"workload.prompts_per_step={2 * n}", "search.max_splits=8"))
        for n in (16, 64, 128)
    ],
    "external streams": [("yes", ("external.streams=true",))],
    "streams and 1 verdict": [("yes", ("external.streams=true", "workload.verdicts_per_response=1"))],
}


def main() -> None:
    """Simulate with each value of each parameter, and print the table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", default=",".join(SWEEPS), help="sweeps to run, with commas between")
    options = arguments.parse_args()
    unknown = set(options.only.split(",")) - set(SWEEPS)
    if unknown:
        arguments.error(f"unknown sweep {sorted(unknown)[0]!r}; there are {', '.join(SWEEPS)}")
    points = [(sweep, *point) for sweep in options.only.split(",") for point in SWEEPS[sweep]]
    console = Console(file=sys.stderr)
    rows = [measure(*point) for point in track(points, console=console, description="simulating", transient=True)]
    show("What colocation saves", rows, as_json=options.json)


def measure(sweep: str, value: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Simulate the layouts with these overrides of the base config, and return their step times as one row of the
    table."""
    config = load_simulation(BASE, overrides)
    colocated, dynamic = full(config), partial_dynamic(config)
    static, external = best_partial_static(config), best_external(config)
    return {
        "sweep": sweep,
        "value": value,
        "full_step_s": colocated.step_s,
        "external_best_step_s": external.step_s,
        "saving_full": 1 - colocated.step_s / external.step_s,
        "full_rollout_s": colocated.rollout_s,
        "static_rollout_s": static.rollout_s,
        "dynamic_rollout_s": dynamic.rollout_s,
        "saving_partial": 1 - dynamic.rollout_s / colocated.rollout_s,
    }


if __name__ == "__main__":
    main()
